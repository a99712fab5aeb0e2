"""Serves models over HTTP: step-level batching, an OpenAI-compatible API, a browser studio, and remote experts."""
