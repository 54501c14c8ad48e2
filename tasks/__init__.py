"""Stages of the pipeline, one module each: (configuration, input artifacts) -> output artifact."""
