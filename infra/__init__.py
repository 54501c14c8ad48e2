"""Things every stage stands on: artifact store, registry, clusters. Imports no other package of the project."""
