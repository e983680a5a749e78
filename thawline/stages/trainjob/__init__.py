"""Fine-tuning on several nodes: a TrainJob of Kubeflow Trainer, submitted and awaited by a task."""
