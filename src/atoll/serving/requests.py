"""The fields of an image request: OpenAI's and ours. Any other field is refused by name."""

import re
import secrets
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atoll.cards import WORDS
from atoll.errors import InputError, shown, unknown
from atoll.sampling.settings import STEPS
from atoll.serving.guard import Refusal
from atoll.serving.models import Served
from atoll.serving.scheduler import Job
from atoll.serving.settings import Limits
from atoll.storage import parse_json

MAX_PROMPT = 4000  # characters
MAX_PREVIEWS = 100
CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
Prompt = Annotated[str, Field(max_length=MAX_PROMPT)]


class Generation(BaseModel):
    """The body of POST /v1/images/generations."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    prompt: Prompt
    model: str | None = Field(None, max_length=200)
    n: int | None = Field(1, ge=1)
    size: str | None = Field("auto", max_length=20)
    response_format: Literal["b64_json", "url"] | None = "b64_json"
    stream: bool | None = False
    partial_images: int | None = Field(0, ge=0, le=MAX_PREVIEWS)
    output_format: Literal["png"] | None = "png"
    # OpenAI's fields that change nothing here.
    background: Literal["auto", "opaque"] | None = None
    quality: str | None = Field(None, max_length=20)
    moderation: str | None = Field(None, max_length=20)
    user: str | None = Field(None, max_length=200)
    # Ours.
    negative_prompt: Prompt | None = ""
    seed: int | None = Field(None, ge=0, lt=2**63)
    steps: int | None = Field(None, ge=1)
    guidance: float | None = Field(None, ge=0)
    solver: str | None = Field(None, max_length=20)
    routing: str | None = Field(None, max_length=40)
    route_every: int | None = Field(None, ge=1)
    confident: float | None = Field(None, gt=0, le=1)
    experts: list[int] | None = Field(None, max_length=4096)
    trace: bool | None = False
    preview: Literal["estimate", "state"] | None = "estimate"  # of the final image, or the current noisy latents

    @classmethod
    def parse(cls, content_type: str, body: bytes) -> "Generation":
        if content_type.partition(";")[0].strip().lower() != "application/json":
            raise Refusal(415, "send the request as application/json")
        try:
            values = parse_json(body)
        except ValueError as error:
            raise Refusal(400, f"the request is not JSON ({error})") from error
        if not isinstance(values, dict):
            raise Refusal(400, "the request must be a table of keys and values")
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise _refusal(error) from error

    def jobs(self, served: Served, client: str, limits: Limits) -> list[Job]:
        """Returns one job per image; without a seed, a random one is drawn."""
        n, steps = self.n or 1, self.steps or served.pipe.made_for or STEPS
        for name, value, most in (("n", n, limits.n), ("steps", steps, limits.steps)):
            if value > most:
                raise Refusal(400, f"{name} is {value}, and this server allows {most}", name)
        sizes = {"auto", f"{served.side}x{served.side}"}
        if (self.size or "auto") not in sizes:
            raise Refusal(400, f"size {shown(self.size)} cannot be made: this model makes {sorted(sizes)[0]}", "size")
        for name in ("prompt", "negative_prompt"):
            if found := CONTROLS.search(getattr(self, name) or ""):
                raise Refusal(400, f"the {name} holds the control character {found[0]!a}: leave it out", name)
        if self.stream and self.response_format == "url":
            raise Refusal(400, "a stream sends images themselves: leave response_format out", "response_format")
        seed = secrets.randbelow(2**53) if self.seed is None else self.seed  # JavaScript has exact integers up to 2**53
        if seed > 2**63 - n:
            raise Refusal(400, f"the seeds of {n} images reach beyond 2**63 - 1: give a smaller one", "seed")
        optional = {"solver": self.solver, "routing": self.routing, "route_every": self.route_every}
        try:
            plan = served.pipe.plan(
                steps=steps, guidance=self.guidance, confident=self.confident, experts=self.experts,
                **{key: value for key, value in optional.items() if value is not None},  # type: ignore[arg-type]
            )  # fmt: skip
        except InputError as error:
            raise Refusal(400, str(error)) from error
        previews = (self.partial_images or 0) if self.stream else 0
        negative = self.negative_prompt or ""
        state = self.preview == "state"
        return [Job(self.prompt, negative, seed + i, plan, client, previews, state) for i in range(n)]


def _refusal(error: ValidationError) -> Refusal:
    """Returns the first error as a sentence; unknown fields come first."""
    faults = error.errors(include_url=False)
    first = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])
    name, kind = shown(".".join(map(str, first["loc"])))[1:-1], first["type"]
    if kind == "extra_forbidden":
        return Refusal(400, str(unknown("field", first["loc"][0], Generation.model_fields)), name)
    if kind == "missing":
        return Refusal(400, f"the request lacks {name}: add it", name)
    message = WORDS.get(kind) or first["msg"].partition("should be ")[2] or first["msg"]
    return Refusal(400, f"{name} must be {message}, but is {shown(first['input'])}", name)


def schema() -> dict[str, Any]:
    """Returns the request's JSON schema."""
    return Generation.model_json_schema()
