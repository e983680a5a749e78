"""Training: schedules, the loop, contrastive pretraining."""
