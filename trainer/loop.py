"""The run: problems in, weights, metrics and checkpoints out. :meth:`Trainer.step` reads from top to bottom."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch

from metagrpo.trainer.adapters import load_adapter, save_model
from metagrpo.trainer.checkpoint import latest_checkpoint, load_state, save_checkpoint, save_state
from metagrpo.trainer.config import Config
from metagrpo.trainer.data.order import batch_indices
from metagrpo.trainer.data.prompts import Problem
from metagrpo.trainer.evaluation import evaluate
from metagrpo.trainer.methods.base import Context, Method, Rollout
from metagrpo.trainer.methods.grpo import GRPO
from metagrpo.trainer.metrics import MetricsLog, step_line
from metagrpo.trainer.optimizer import Optimizer
from metagrpo.trainer.outcomes import sample_metrics
from metagrpo.trainer.perf import StepTimer, peak_flops, peak_memory_gb, perf_metrics, training_flops
from metagrpo.trainer.rewards import RewardPool
from metagrpo.trainer.rollout.native import NativeSampler
from metagrpo.trainer.rollout.protocol import request_seed
from metagrpo.trainer.rollout.record import load_samples, save_samples
from metagrpo.trainer.rundir import RunDirectory, append_jsonl, rewind_jsonl, write_jsonl
from metagrpo.trainer.sample import Sample
from metagrpo.trainer.setup import Workload, load_policy
from metagrpo.trainer.signals import Interrupted, StopSignals
from metagrpo.trainer.trackers import open_trackers
from metagrpo.trainer.update import Counts, Updater

METHODS: dict[str, Callable[[], Method]] = {"grpo": GRPO}


class Trainer:
    """A run in its directory; a context manager, for the processes and files that it holds.

    Nothing is written before :meth:`train`, so that a run which is refused leaves nothing behind.

    Args:
        config: the resolved configuration.
        workload: tokenizer and problems, as :func:`metagrpo.trainer.setup.load_workload` made them.
        run: the directory; this process holds it once it trains, and where it resumes.
        resume: go on from the newest checkpoint, or from the start where there is none.
        echo: gets each line for a person.

    Raises:
        ConfigError: model, adapters or rewards do not go with each other or cannot be loaded.
    """

    def __init__(
        self, config: Config, workload: Workload, run: RunDirectory, resume: bool, echo: Callable[[str], None] = print
    ) -> None:
        self.config = config
        self.workload = workload
        self.run = run
        self.echo = echo
        with ExitStack() as stack:
            self.signals = stack.enter_context(StopSignals())
            checkpoint = latest_checkpoint(run.checkpoints) if resume else None
            full = checkpoint if checkpoint and not config.lora.enabled else None
            self.policy = load_policy(config, weights=full)
            self.policy.check()
            updates = config.train.steps * config.train.num_iterations * config.train.minibatches
            self.optimizer = Optimizer(self.policy.trainable(), config.train, updates)
            self.updater = Updater(self.policy, self.optimizer, config)
            self.finished = 0
            self.num_tokens = 0
            if checkpoint:
                self._load(checkpoint)
            self.saved = self.finished
            self.timer = StepTimer(self.policy.device)
            self.method = METHODS[config.method.name]()
            self.context = Context(
                config=config,
                tokenizer=workload.tokenizer,
                sampler=NativeSampler(self.policy, config.rollout.max_batch_size),
                rewards=stack.enter_context(RewardPool(config.reward)),
                timer=self.timer,
                stop_ids=workload.stop_ids(self.policy),
                adapter=self.policy.adapter,
            )
            stack.callback(self.context.sampler.close)
            for problems in (workload.train, workload.held_out):
                if problems:
                    self.context.rewards.check(list(problems[0].columns))
            self._exit = stack.pop_all()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exit.close()

    def train(self) -> int | None:
        """Run the steps that are left.

        Returns:
            The number of the signal that stopped the run, after a checkpoint; ``None`` where it came to its end.
        """
        steps = self.config.train.steps
        try:
            self.echo(self.headline())
            self._open_log()
            if self.finished == 0:
                self._evaluate(0)
            self.timer.finish()  # the start and the first evaluation are no part of step 1
            while self.finished < steps:
                step = self.finished + 1
                metrics = self.step(step)
                self.echo(step_line(step, metrics))
        except Interrupted as interruption:
            self._checkpoint()
            self.echo(f"stopped by {interruption} after step {self.finished}; go on with --resume")
            return interruption.number
        self._checkpoint()
        return None

    def step(self, step: int) -> dict[str, float]:
        """One step, counted from 1: sample and grade, update, write down."""
        torch.manual_seed(request_seed(self.config.train.seed, "dropout", step))
        with self.timer.phase("data"):
            problems = self.problems(step)
        rollout = self._collect(step, problems)
        # From here the weights are between two steps: a signal waits.
        with self.signals.deferred():
            update = self.updater.update(rollout.samples, step, self.timer)
            with self.timer.phase("sync"):
                self.context.sampler.sync(step)
            self.finished = step
            self.num_tokens += sum(len(sample.token_ids) for sample in rollout.samples)
            evaluation = self._evaluate(step) if self._is_due(self.config.eval.every) else {}
            with self.timer.phase("log"):
                if self.config.log.rollouts:
                    write_jsonl(self.run.rollout_file(step), map(rollout_row, rollout.samples))
            seconds = self.timer.finish()
            metrics = {
                **sample_metrics(rollout.samples),
                **rollout.metrics,
                **update.metrics,
                **evaluation,
                "num_tokens": float(self.num_tokens),
                "data/overlong": float(self.workload.overlong),
                **seconds,
                **self._perf(seconds, rollout.samples, update.counts),
            }
            self.log.write(step, metrics)
            # Last, so that a kill never leaves a checkpoint whose step was not logged; its time is the next step's.
            if self._is_due(self.config.checkpoint.every):
                self._checkpoint()
        return metrics

    def problems(self, step: int) -> list[Problem]:
        """The problems of a step: a function of the seed and the step alone."""
        train = self.config.train
        indices = batch_indices(len(self.workload.train), train.prompts_per_step, train.seed, step - 1)
        return [self.workload.train[index] for index in indices]

    def headline(self) -> str:
        """The run's first line: what is trained, where, and which implementations serve."""
        trained = sum(parameter.numel() for parameter in self.policy.trainable().values())
        adapter = f"LoRA r {self.config.lora.r}" if self.config.lora.enabled else "full fine-tuning"
        return (
            f"{self.config.method.name} on {self.config.model.path} ({self.policy.num_parameters() / 1e6:.0f}M, "
            f"{str(self.policy.dtype).removeprefix('torch.')}, {self.policy.device}), {adapter}, "
            f"{trained / 1e6:.1f}M trained; attention {self.policy.attention}; "
            f"sampler {self.config.rollout.backend}; "
            f"{len(self.workload.train)} problems ({self.workload.left_out}), "
            f"{len(self.workload.held_out)} held out"
        )

    def _open_log(self) -> None:
        """Begin or continue the logs; steps beyond the checkpoint are dropped, since they run again."""
        config = self.config
        trackers = open_trackers(
            config.log.backends,
            project=config.log.project,
            run=self.run.path.name,
            config=config.model_dump(mode="json"),
            logs=self.run.logs,
            first_step=self.finished,
        )
        self.log = MetricsLog(self.run, trackers)
        self._exit.callback(self.log.close)
        self.log.rewind(self.finished + 1)
        # The evaluation before step 1 is that of step 0, and runs again with it.
        rewind_jsonl(self.run.eval / "eval.jsonl", self.finished + 1 if self.finished else 0)

    def _collect(self, step: int, problems: list[Problem]) -> Rollout:
        rollout_config = self.config.rollout
        if rollout_config.replay:
            return Rollout(load_samples(rollout_config.replay, step))
        rollout = self.method.collect(step, problems, self.context)
        if rollout_config.save:
            with self.timer.phase("log"):
                save_samples(rollout_config.save, step, rollout.samples)
        return rollout

    def _is_due(self, every: int) -> bool:
        return self.finished == self.config.train.steps or (every > 0 and self.finished % every == 0)

    def _evaluate(self, step: int) -> dict[str, float]:
        if not self.workload.held_out:
            return {}
        with self.timer.phase("eval"):
            evaluation = evaluate(self.workload.held_out, self.context, self.config.eval)
            write_jsonl(self.run.eval / f"step_{step:06d}.jsonl", evaluation.completions)
            append_jsonl(self.run.eval / "eval.jsonl", {"step": step, **evaluation.summary()})
        self.echo(f"step {step}  held-out accuracy {evaluation.accuracy:.3f} on {evaluation.problems} problems")
        return {f"eval/{name}": value for name, value in evaluation.summary().items()}

    def _perf(self, seconds: dict[str, float], samples: list[Sample], counts: Counts) -> dict[str, float]:
        generated = 0 if self.config.rollout.replay else sum(sample.completion_length for sample in samples)
        metrics = perf_metrics(
            seconds,
            logical_tokens=sum(len(sample.token_ids) for sample in samples),
            generated_tokens=generated,
            trained_tokens=counts.trained,
            forwarded_tokens=counts.forwarded,
            computed_tokens=counts.forwarded,
            flops=training_flops(
                self.policy.matmul_parameters(),
                forwarded_tokens=counts.forwarded,
                scored_tokens=counts.scored,
                frozen_base=self.config.lora.enabled,
            ),
            peak=peak_flops(self.policy.device),
        )
        return {**metrics, "perf/peak_mem_gb": peak_memory_gb(self.policy.device)}

    def _checkpoint(self) -> None:
        """Save the state after the last finished step, unless that is saved already."""
        if self.saved == self.finished:
            return
        settings = self.config.checkpoint
        with self.timer.phase("checkpoint"):
            save_checkpoint(
                self.run.checkpoints,
                self.finished,
                self._write_checkpoint,
                keep_last=settings.keep_last,
                keep_every=settings.keep_every,
            )
        self.saved = self.finished

    def _write_checkpoint(self, directory: Path) -> None:
        save_model(self.policy, self.workload.tokenizer, directory)
        save_state(directory, self.optimizer.state(), {"step": self.finished, "num_tokens": self.num_tokens})

    def _load(self, checkpoint: Path) -> None:
        if self.config.lora.enabled:
            load_adapter(self.policy.model, checkpoint)
        tensors, meta = load_state(checkpoint)
        self.optimizer.load_state(tensors)
        self.finished = meta["step"]
        self.num_tokens = meta["num_tokens"]


def rollout_row(sample: Sample) -> dict[str, object]:
    """What ``rollouts/`` keeps of a sample: text, rewards and lengths; the ids are in ``rollout.save``."""
    return {
        "id": sample.id,
        "group": sample.group,
        **sample.info,
        "rewards": sample.rewards,
        "reward": sample.reward,
        "advantage": sample.advantage,
        "length": sample.completion_length,
        "finish_reason": sample.finish_reason,
    }
