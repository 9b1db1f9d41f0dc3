"""Replicas on Ray Serve: the application in one process, a model and a cache in each of several others."""
