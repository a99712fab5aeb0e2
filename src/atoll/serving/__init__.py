"""A model behind a URL: step-level batching, an HTTP API, a studio in the browser, experts with their owners."""
