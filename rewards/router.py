"""One entrance to all rewards: picks the task type, runs it where it is safe, adds format and extra terms.

Training and evaluation call the same `RewardRouter.score`. The types and their names come from
`conf/reward/default.yaml`, so a new type is one Python file and one YAML.
"""

from __future__ import annotations

import difflib
import logging
import math
import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from datamodules.common.places import CONF_DIR
from rewards.base import HasJudge, Query, Score, TaskReward, Verdict, unparsable
from rewards.extract.choice import as_options
from rewards.extract.sections import Answer, read_answer
from rewards.format import STYLES, Style, format_score
from rewards.official import judge_official
from rewards.pool import ScoringPool
from rewards.terms import Term

if TYPE_CHECKING:
    from datamodules.types import Sample
    from rewards.judge.client import Judge
    from rollout.types import Response

log = logging.getLogger(__name__)
Mode = Literal["robust", "official"]
_ARGUMENTS = frozenset({"self", "response", "ground_truth", "problem_type", "options", "mode", "benchmark"})
"""Arguments of `RewardRouter.submit`, which further fields of a record must not overwrite."""
DEFAULT_CONFIG = CONF_DIR / "reward" / "default.yaml"


@lru_cache(maxsize=4096)
def canonical(name: str) -> str:
    """Spelling-independent form of a type's name: "Multi-Choice", "multi_choice" and "multi choice" are one."""
    return re.sub(r"[\s_\-]+", " ", name.strip().casefold())


def default_routes() -> dict[str, TaskReward]:
    """The task types of `conf/reward/default.yaml`. Raises RuntimeError when the configuration folder is missing."""
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    if not DEFAULT_CONFIG.is_file():
        raise RuntimeError(f"{DEFAULT_CONFIG} is missing: pass `routes` to RewardRouter")
    return instantiate(OmegaConf.load(DEFAULT_CONFIG).routes, _convert_="all")


class RewardRouter:
    """Scores responses of every task type.

    Args:
        routes: task type by name; the names and `aliases` of each are what `problem_type` may say. None = those of
            `conf/reward/default.yaml`.
        accuracy_weight: weight of the accuracy in the total.
        format_weight: weight of the format in the total.
        style: what a well-formed response looks like: thinking, direct, or auto (thinking optional).
        terms: extra terms of the total by name (see `rewards.terms`).
        judge: judge of every judged type that has none of its own.
        workers: processes of the pool for slow and hostile types; it starts with the first such answer.
        memory_mb: address space of each of them in MiB.
        threads: answers that wait for a remote judge at the same time.

    Example: `RewardRouter().score(response="<answer>B</answer>", ground_truth="B", problem_type="multiple choice",
    options=["A. a cup", "B. a dog"])` has accuracy 1, format 1 and total 1.
    """

    def __init__(
        self,
        routes: Mapping[str, TaskReward] | None = None,
        accuracy_weight: float = 0.9,
        format_weight: float = 0.1,
        style: Style = "auto",
        terms: Mapping[str, Term] | None = None,
        judge: Judge | None = None,
        workers: int = 2,
        memory_mb: int = 4096,
        threads: int = 16,
    ) -> None:
        if accuracy_weight < 0 or format_weight < 0:
            raise ValueError(
                f"accuracy_weight={accuracy_weight} and format_weight={format_weight} must not be negative"
            )
        if style not in STYLES:
            raise ValueError(f"style={style!r}: use one of {', '.join(STYLES)}")
        self.tasks = dict(default_routes() if routes is None else routes)
        self.accuracy_weight, self.format_weight, self.style = accuracy_weight, format_weight, style
        self.terms = dict(terms or {})
        for task in self.tasks.values():
            if isinstance(task, HasJudge) and task.judge_model is None:
                task.judge_model = judge
        self._workers, self._memory_mb, self._num_threads = workers, memory_mb, threads
        self._names: dict[str, str] = {}
        for name, task in self.tasks.items():
            for spelling in (name, *task.aliases):
                if self._names.setdefault(canonical(spelling), name) != name:
                    other = self._names[canonical(spelling)]
                    raise ValueError(f"problem_type {spelling!r} belongs to both {other!r} and {name!r}")
        self._pool: ScoringPool | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def type_name(self, problem_type: str) -> str:
        """The route that `problem_type` takes. Raises ValueError with the nearest names when there is none."""
        name = self._names.get(canonical(str(problem_type)))
        if name is None:
            near = difflib.get_close_matches(canonical(str(problem_type)), self._names, n=3, cutoff=0.4)
            hint = (
                f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(sorted(self.tasks))}"
            )
            raise ValueError(
                f"unknown problem_type {problem_type!r}: {hint} A new type is one file and one YAML, "
                "see docs/adding-a-reward.md"
            )
        return name

    def score(self, **record: Any) -> Score:
        """Score one response and wait for the verdict; the arguments are those of `submit`."""
        return self.submit(**record).result()

    def submit_response(self, sample: Sample, response: Response) -> Future[Score]:
        """Score a response with everything that its sample says: the one way of training and of held-out evaluation.

        Raises:
            ValueError: an unknown `problem_type`; nothing else.
        """
        fields: dict[str, Any] = {str(k): v for k, v in sample.extra.items() if str(k) not in _ARGUMENTS}
        fields |= {
            "question": sample.problem,
            "uid": sample.uid,
            "num_tokens": len(response.token_ids),
            "finish_reason": response.finish_reason,
        }
        return self.submit(
            response=response.text,
            ground_truth=sample.answer,
            problem_type=sample.problem_type,
            options=sample.options,
            **fields,
        )

    def submit(
        self,
        *,
        response: str,
        ground_truth: Any,
        problem_type: str,
        options: Sequence[str] | Mapping[str, str] | None = None,
        mode: Mode = "robust",
        benchmark: str | None = None,
        **fields: Any,
    ) -> Future[Score]:
        """Score one response; returns at once with a future where judging is slow. The future does not raise.

        Args:
            response: what the policy wrote, thinking and tags included.
            ground_truth: the gold answer; answer tags around it are removed.
            problem_type: chooses the task type; an unknown one raises ValueError with the nearest names.
            options: answer options with their letters, as a list or by letter.
            mode: "robust" reads answers as a careful person would; "official" does what the scorer of `benchmark`
                does, mistakes included.
            benchmark: needed by "official"; in "robust" it adds the benchmark's protocol markers.
            fields: everything else known about the sample (question, tests, width, height, num_tokens, ...).
        """
        name = self.type_name(problem_type)
        gold = ground_truth
        if gold is None or (isinstance(gold, float) and math.isnan(gold)):
            gold = ""  # missing: an error of its type, where "None" would be a text that answers could equal
        if isinstance(gold, str) and "<answer>" in gold.lower():
            gold = read_answer(gold).text or gold
        response = "" if response is None else str(response)
        try:
            query = Query(response, gold, problem_type, as_options(options), fields, benchmark)
        except ValueError as error:  # a bad record costs its own verdict, not the step
            return _done(Score(0.0, 0.0, 0.0, status="error", reason=str(error)[:1000]))
        if mode == "official":
            said = judge_official(query)
            return _done(Score(said.accuracy, 1.0, said.accuracy, said.parts, said.status, said.reason))
        if mode != "robust":
            raise ValueError(f"mode={mode!r}: use 'robust' or 'official'")
        task = self.tasks[name]
        answer = read_answer(response)
        if answer.think == "open" or not answer.text:
            reason = "the thinking never ended" if answer.think == "open" else "empty answer"
            return _done(self._finish(query, answer, task, unparsable(reason)))
        if task.lane == "inline":
            return _done(self._finish(query, answer, task, _guarded(task, query, answer.text)))
        result: Future[Score] = Future()
        if task.lane == "process":
            pending = self._start_pool().submit(name, query, answer.text, task.time_limit(query))
        else:
            pending = self._start_threads().submit(_guarded, task, query, answer.text)

        def relay(done: Future[Verdict]) -> None:
            try:
                result.set_result(self._finish(query, answer, task, done.result()))
            except BaseException as error:  # noqa: BLE001 - a callback's exception would be lost and the caller wait forever
                result.set_exception(error)

        pending.add_done_callback(relay)
        return result

    def _finish(self, query: Query, answer: Answer, task: TaskReward, verdict: Verdict) -> Score:
        """Add format and terms to the verdict."""
        try:
            well = format_score(answer, query, task, query.fields.get("style", self.style))
        except Exception:  # noqa: BLE001 - a bad record or hostile text: the verdict says so already
            well = 0.0
        parts = {"accuracy": verdict.accuracy, "format": well, **verdict.parts}
        reward = verdict.accuracy if verdict.reward is None else verdict.reward
        total = self.accuracy_weight * reward + self.format_weight * well
        for name, term in self.terms.items():
            try:
                parts[name] = float(term(query))
            except (TypeError, ValueError, OverflowError) as error:
                return Score(0.0, 0.0, 0.0, status="error", reason=f"term {name!r}: {error}"[:1000])
            total += parts[name]
        for name, value in {**parts, "total": total}.items():
            if not math.isfinite(value):  # one such reward would spoil the advantages of its whole batch
                return Score(0.0, 0.0, 0.0, status="error", reason=f"reward part {name!r} is {value}")
        return Score(verdict.accuracy, well, total, parts, verdict.status, verdict.reason)

    def _start_pool(self) -> ScoringPool:
        with self._lock:
            if self._pool is None:
                heavy = {name: task for name, task in self.tasks.items() if task.lane == "process"}
                self._pool = ScoringPool(heavy, self._workers, self._memory_mb)
            return self._pool

    def _start_threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="reward-judge")
            return self._threads

    def warm_up(self) -> None:
        """Start the pool now, so that its processes import their libraries while something else goes on."""
        if any(task.lane == "process" for task in self.tasks.values()):
            self._start_pool()

    def close(self) -> None:
        """End the processes and threads. A closed router starts new ones when it is used again."""
        with self._lock:
            if self._pool is not None:
                self._pool.close()
            if self._threads is not None:
                self._threads.shutdown(wait=False, cancel_futures=True)
            self._pool = self._threads = None

    def __enter__(self) -> RewardRouter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None, "_threads": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())


def _done(score: Score) -> Future[Score]:
    future: Future[Score] = Future()
    future.set_result(score)
    return future


def _guarded(task: TaskReward, query: Query, answer: str) -> Verdict:
    try:
        return task.judge(query, answer)
    except ValueError as error:
        return Verdict(0.0, "error", str(error)[:1000])
    except Exception as error:  # noqa: BLE001 - untrusted text: what it does to a scorer becomes this answer's status
        log.warning("scoring a %s answer failed: %s: %s", query.problem_type, type(error).__name__, error)
        return Verdict(0.0, "error", f"{type(error).__name__}: {error}"[:1000])
