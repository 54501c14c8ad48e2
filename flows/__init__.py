"""Entry points: the Prefect flow and the command line. No stage's logic lives here."""

from infra.environment import quiet

# Before Prefect, Ray, MLflow or the hub client are imported: they read their settings then.
quiet()
