-- The database that POSTGRES_DB names is Prefect's; this one is MLflow's.
CREATE DATABASE mlflow;
