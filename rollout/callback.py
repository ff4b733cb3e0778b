"""The engine in the training loop: sync weights, generate, publish each finished group, sleep."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L

from datamodules.common.seeds import response_seed
from datamodules.prepare import load_processor
from rollout.engines.lockstep import LockStepEngine
from rollout.model_folder import model_folder
from rollout.types import (
    Engine,
    EngineFamily,
    GenerateRequest,
    GroupSink,
    Response,
    RolloutEditor,
    RolloutGroup,
    SamplingSpec,
)
from rollout.weight_sync import WeightSync

if TYPE_CHECKING:
    from datamodules.types import PreparedSample, StepBatch

log = logging.getLogger(__name__)

GREEDY = "greedy"
"""Last part of the request id of a greedy baseline response."""


class ColocatedEngineCallback(L.Callback):
    """Generates the responses of every step with an engine in the trainer's own process.

    Sinks that subscribed receive each group as soon as its last response is finished, while
    other prompts are still generating; `batch.groups` holds all of them in the order of the prompts.

    The module provides `weights_version: int` (changes with every update), `engine_weights()` (checkpoint names and
    tensors, streamed; a collective under FSDP2) and `needs_greedy_baseline: bool`.

    Args:
        engine: builds the engine; called once the process group exists.
        sampling: how responses are drawn. Empty `banned_ids` and `stop_ids` are filled from the model folder.
        model_path: the model's folder (or hub name) that placeholder ids, stop ids and weight names are read from.
        family: the model's family, which knows them.
        seed: the run's seed.
        check_weights: compare the names of every sync with the checkpoint and refuse weights that are not finite.
    """

    def __init__(
        self,
        engine: Callable[[], Engine],
        sampling: SamplingSpec | Mapping[str, Any],
        model_path: str | Path,
        family: EngineFamily,
        seed: int = 0,
        check_weights: bool = True,
    ) -> None:
        self._build = engine
        self._model_path = model_path
        self._family = family
        self._seed = seed
        self._check_weights = check_weights
        self._requested = sampling if isinstance(sampling, SamplingSpec) else SamplingSpec(**sampling)
        self._sampling: SamplingSpec | None = None
        self._sinks: list[GroupSink] = []
        self._editors: list[RolloutEditor] = []
        self._module: Any = None
        self._sessions = 0
        self._sync: WeightSync | None = None
        self.engine: Engine | None = None

    @property
    def running(self) -> Engine:
        """The engine; there is one between `setup` and `teardown`."""
        if self.engine is None:
            raise RuntimeError("the engine is not built: the callback's setup has not run")
        return self.engine

    @property
    def sampling(self) -> SamplingSpec:
        """The complete specification: banned and stop ids filled in. The trainer masks the same ids."""
        if self._sampling is None:
            self._sampling = resolve_sampling(self._requested, self._model_path, self._family)
        return self._sampling

    def subscribe(self, sink: GroupSink) -> None:
        """Let `sink` receive every training group from now on (not those of evaluation)."""
        self._sinks.append(sink)

    def subscribe_editor(self, editor: RolloutEditor) -> None:
        """Let `editor` change training's requests and groups from now on."""
        self._editors.append(editor)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Build the engine, before the policy takes its memory, and let it sleep."""
        self._module = pl_module
        if self.engine is not None:
            return
        started = time.monotonic()
        engine = self._build()
        ranks = getattr(engine, "tensor_parallel_size", 1)
        self.engine = LockStepEngine(engine, ranks) if ranks > 1 else engine
        expected = self._family.checkpoint_names(model_folder(self._model_path)) if self._check_weights else None
        self._sync = WeightSync(self.engine, expected, check_finite=self._check_weights)
        self.engine.sleep()
        log.info("engine ready after %.1f s", time.monotonic() - started)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse a trainer that scores another distribution than the engine samples from."""
        check_same_distribution(pl_module, self.sampling)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Release the engine."""
        if self.engine is not None:
            self.engine.close()
        self.engine, self._sync, self._module = None, None, None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: StepBatch, batch_idx: int
    ) -> None:
        """Fill `batch.groups`."""
        self._module = pl_module
        for editor in self._editors:
            editor.begin(batch, self.sampling)
        requests = self.requests(batch.prompts, batch.rl_step, bool(getattr(pl_module, "needs_greedy_baseline", False)))
        for editor in self._editors:
            requests = editor.edit_requests(requests)
        batch.groups = []
        with self.session(batch.timings, batch.metrics):
            started = time.monotonic()
            groups: dict[int, RolloutGroup] = {}
            # Closed also when a sink raises: the engine must be idle before it sleeps.
            stream: Any = self.running.generate(requests)
            with closing(stream):
                for group in assemble(batch.prompts, requests, stream, self.sampling.n):
                    edited = reduce(lambda g, editor: editor.edit_group(g), self._editors, group)
                    groups[edited.index] = edited
                    for sink in self._sinks:
                        sink.put(edited)
            batch.timings["generate"] = time.monotonic() - started
        batch.groups = [groups[index] for index in sorted(groups)]
        batch.metrics |= rollout_metrics(batch.groups, batch.timings["generate"])

    def requests(self, prompts: Sequence[PreparedSample], rl_step: int, greedy: bool) -> list[GenerateRequest]:
        """n sampled requests per prompt, plus a greedy one where a baseline is needed."""
        result = []
        for index, prompt in enumerate(prompts):
            for k in range(self.sampling.n):
                seed = response_seed(self._seed, rl_step, prompt.uid, k)
                result.append(GenerateRequest(f"{rl_step}:{index}:{k}", prompt, self.sampling, seed))
            if greedy:
                spec = dataclasses.replace(self.sampling, n=1, temperature=0.0)
                result.append(GenerateRequest(f"{rl_step}:{index}:{GREEDY}", prompt, spec, 0))
        return result

    def generate_fn(self, requests: Sequence[GenerateRequest]) -> Iterator[tuple[str, Response]]:
        """Generate with the policy's current weights: the lock-step driver of `GenerateFn`, for evaluation.

        Every rank calls it the same number of times, with or without requests of its own, and exhausts the result.
        Several calls inside one `session` wake the engine once.
        """
        with self.session():
            yield from self.running.generate(requests)

    @contextmanager
    def session(
        self, timings: dict[str, float] | None = None, metrics: dict[str, float] | None = None
    ) -> Iterator[None]:
        """Keep the engine awake, with the module's current weights; it sleeps when the outermost session ends.

        A collective under FSDP2: every rank enters it.

        Args:
            timings: receives the seconds of wake, sync and sleep.
            metrics: receives the scalars of the sync.
        """
        timings = {} if timings is None else timings
        self._sessions += 1
        try:
            started = time.monotonic()
            self.running.wake()
            timings["wake"] = time.monotonic() - started
            assert self._sync is not None  # made with the engine
            report = self._sync.sync(self._module.weights_version, self._module.engine_weights)
            timings["sync"] = report.seconds if report else 0.0
            if report and metrics is not None:
                metrics.update(report.metrics())
            yield
        finally:
            self._sessions -= 1
            if self._sessions == 0:
                started = time.monotonic()
                self.running.sleep()
                timings["sleep"] = time.monotonic() - started


def resolve_sampling(spec: SamplingSpec, model_path: str | Path, family: EngineFamily) -> SamplingSpec:
    """Fill empty `banned_ids` and `stop_ids` with those of the model at `model_path` and its family."""
    banned, stop = tuple(spec.banned_ids), tuple(spec.stop_ids)
    if not banned or not stop:
        folder = model_folder(model_path)
        family.open(str(folder))
        banned = banned or tuple(sorted(family.banned_ids))
        stop = stop or family.stop_ids(load_processor(folder).tokenizer)
    return dataclasses.replace(spec, banned_ids=banned, stop_ids=stop)


def check_same_distribution(module: Any, sampling: SamplingSpec) -> None:
    """Raise ValueError when temperature or banned ids of trainer and engine differ, or the sampling is truncated.

    Args:
        module: may have `banned_ids` and `update_settings.temperature`; what it lacks is not compared.
        sampling: the engine's complete specification.
    """
    banned = getattr(module, "banned_ids", None)
    if banned is not None and set(banned) != set(sampling.banned_ids):
        raise ValueError(
            f"the trainer masks token ids {sorted(banned)}, the engine bans {sorted(sampling.banned_ids)}; leave "
            "rollout.sampling.banned_ids empty, or give both the same"
        )
    temperature = getattr(getattr(module, "update_settings", None), "temperature", None)
    if temperature is not None and temperature != sampling.temperature:
        raise ValueError(
            f"module.temperature={temperature} but rollout.sampling.temperature={sampling.temperature}; they must agree"
        )
    if sampling.temperature == 0:
        raise ValueError("rollout.sampling.temperature=0 samples n equal responses, whose advantages are all zero")
    if sampling.top_p < 1 or sampling.top_k > 0:
        log.warning(
            "rollout.sampling.top_p=%s, top_k=%s truncate the sampled distribution; the trainer's log-probs do not "
            "know that, so the importance ratio is off from the first update on",
            sampling.top_p,
            sampling.top_k,
        )


def assemble(
    prompts: Sequence[PreparedSample],
    requests: Sequence[GenerateRequest],
    responses: Iterator[tuple[str, Response]],
    n: int,
) -> Iterator[RolloutGroup]:
    """Yield each prompt's group when its last response arrives; responses stand in the order of their requests.

    Raises:
        RuntimeError: a response belongs to no request or came twice, or a prompt lacks responses at the end.
    """
    places: dict[str, tuple[int, int | str]] = {}
    missing = [0] * len(prompts)
    for request in requests:
        _, place, number = request.request_id.split(":")
        places[request.request_id] = (int(place), number if number == GREEDY else int(number))
        missing[int(place)] += 1
    received: list[dict[int | str, Response]] = [{} for _ in prompts]
    for request_id, response in responses:
        if request_id not in places:
            raise RuntimeError(f"the engine returned response {request_id}, which was not asked for or came before")
        index, k = places.pop(request_id)
        received[index][k] = response
        missing[index] -= 1
        if missing[index] == 0:
            parts, received[index] = received[index], {}
            answers = tuple(parts[k] for k in range(n) if k in parts)
            yield RolloutGroup(index, prompts[index], answers, parts.get(GREEDY))
    if places:
        lacking = {prompts[index].uid: missing[index] for index, _ in places.values()}
        raise RuntimeError(
            f"the engine returned too few responses; missing per sample: {dict(list(lacking.items())[:8])}"
        )


def rollout_metrics(groups: Sequence[RolloutGroup], seconds: float) -> dict[str, float]:
    """Scalars about the step's generated responses on this rank: lengths, truncation, speed."""
    responses = [response for group in groups for response in group.responses if not response.offline]
    if not responses:
        return {}
    lengths = [len(response.token_ids) for response in responses]
    return {
        "rollout/responses_count": float(len(responses)),
        "rollout/response_tokens_count": float(sum(lengths)),
        "rollout/response_length": sum(lengths) / len(lengths),
        "rollout/response_length_max": float(max(lengths)),
        "rollout/prompt_length": sum(group.prompt.num_prompt_tokens for group in groups) / len(groups),
        "rollout/truncated": sum(r.finish_reason == "length" for r in responses) / len(responses),
        "rollout/tokens_per_second": sum(lengths) / max(seconds, 1e-9),
    }
