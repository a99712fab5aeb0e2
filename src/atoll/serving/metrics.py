"""Metrics for Prometheus."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from atoll.errors import InputError
from atoll.serving.access import Access
from atoll.serving.guard import NEEDED
from atoll.serving.scheduler import Observer

ROUTES = {"/v1/images/generations", "/v1/models", "/v1/velocity", "/v1/expert", "/metrics", "/healthz", "/readyz", "/"}
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """A server's metrics, in their own registry."""

    def __init__(self) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError as error:
            raise InputError(NEEDED) from error
        self._prometheus, self.registry = prometheus, prometheus.CollectorRegistry()
        options: dict[str, Any] = {"registry": self.registry}
        self._requests = prometheus.Counter(
            "atoll_requests", "Requests by route and status", ["route", "status"], **options
        )
        self._seconds = prometheus.Histogram(
            "atoll_request_seconds", "Time per request", ["route"], buckets=SECONDS, **options
        )
        self._images = prometheus.Counter("atoll_images", "Images made", ["model", "complete"], **options)
        self._waits = prometheus.Histogram(
            "atoll_wait_seconds", "Time until an image starts", ["model"], buckets=SECONDS, **options
        )
        self._steps = prometheus.Histogram("atoll_step_seconds", "Time per step", ["model"], buckets=SECONDS, **options)
        self._batch = prometheus.Histogram(
            "atoll_step_images", "Images per step", ["model"], buckets=(1, 2, 4, 8, 16, 32, 64, 128), **options
        )
        self._answered = prometheus.Counter(
            "atoll_expert_samples", "Velocities by expert", ["model", "expert"], **options
        )
        self._gauges = {
            name: prometheus.Gauge(f"atoll_images_{name}", f"Images {what}", ["model"], **options)
            for name, what in (("in_flight", "that advance"), ("waiting", "that wait for a place"))
        }
        self._keys = prometheus.Gauge("atoll_key_used", "Images, or samples of an expert, by key", ["key"], **options)

    def request(self, path: str, status: int, seconds: float) -> None:
        route = path if path in ROUTES else "other"  # no label from a client's arbitrary path
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def observer(self, model: str) -> Observer:
        metrics = self

        class Observing(Observer):
            def stepped(self, seconds: float, images: int, samples: Counter[int]) -> None:
                metrics._steps.labels(model).observe(seconds)
                metrics._batch.labels(model).observe(images)
                for number, count in samples.items():
                    metrics.answered(model, number, count)

            def finished(self, waited: float | None, without: bool) -> None:
                if waited is not None:
                    metrics._waits.labels(model).observe(waited)
                metrics._images.labels(model, "no" if without else "yes").inc()

        return Observing()

    def answered(self, model: str, number: int, count: int) -> None:
        self._answered.labels(model, str(number)).inc(count)

    def text(self, access: Access, counts: Iterable[tuple[str, tuple[int, int]]]) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        for model, (running, waiting) in counts:
            self._gauges["in_flight"].labels(model).set(running)
            self._gauges["waiting"].labels(model).set(waiting)
        for name, _, used in access.usage():
            self._keys.labels(name).set(used)
        text: bytes = self._prometheus.generate_latest(self.registry)
        return text
