"""Kubeflow pipelines made of the components, and the runner that executes them on a laptop."""
