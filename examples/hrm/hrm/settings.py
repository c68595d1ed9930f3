"""The settings of pretrain.py and evaluate.py: composed by Hydra, checked, frozen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from hrm.dataset import Metadata
from hrm.kept_outputs import OutputName
from hrm.learner import LearnerConfig, Placing
from hrm.losses import LossKind
from hrm.model_config import GradientSpan, Mixer, ModelConfig, Positions
from shoal.config import Section, compose_file, validate
from shoal.errors import ConfigError

__all__ = [
    "CONFIG_FOLDER",
    "ArchConfig",
    "EvaluateConfig",
    "LossConfig",
    "PretrainConfig",
    "Resume",
    "read_evaluate",
    "read_pretrain",
]

CONFIG_FOLDER = Path(__file__).parents[1] / "config"

Resume = Literal["auto", "never", "must"]

# Settings of place, logs, stopping and device: they do not change what a run learns.
_OF_NO_EFFECT = {
    *("project_name", "run_name", "checkpoint_path", "log_path"),
    *("resume", "save_checkpoints", "keep_checkpoints", "checkpoint_every_eval"),
    *("eval_examples", "eval_save_outputs", "max_steps", "max_seconds"),
    *("log_every", "tensorboard", "wandb", "device", "threads", "profile"),
    *("compile", "cuda_graphs"),
    "puzzle_emb_sharding",
}


class LossConfig(Section):
    """`arch.loss`."""

    loss_type: LossKind = "stablemax_cross_entropy"


class ArchConfig(Section):
    """`arch`: the model, under the names that HRM's files give its parts; see `ModelConfig`."""

    name: str = "hrm_v1"
    loss: LossConfig = LossConfig()
    halt_exploration_prob: float = Field(default=0.1, ge=0, le=1)
    halt_max_steps: PositiveInt = 16
    bootstrap: bool = True
    H_cycles: PositiveInt = 2
    L_cycles: PositiveInt = 2
    H_layers: NonNegativeInt = 4
    L_layers: PositiveInt = 4
    shared_network: bool = False
    gradient_span: GradientSpan = "last_calls"
    hidden_size: PositiveInt = 512
    num_heads: PositiveInt = 8
    expansion: PositiveFloat = 4.0
    gated_multiple: PositiveInt = 256
    mixer: Mixer = "attention"
    pos_encodings: Positions = "rope"
    rope_theta: PositiveFloat = 10000.0
    rms_norm_eps: PositiveFloat = 1e-5
    puzzle_emb_ndim: NonNegativeInt = 512
    puzzle_emb_len: PositiveInt | None = None
    forward_dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    ema_decay: float | None = Field(default=None, ge=0, lt=1)

    def model_for(self, data: Metadata) -> ModelConfig:
        """The model of some data.

        Raises:
            ConfigError: sizes that do not fit each other.
        """
        return ModelConfig(
            vocab_size=data.vocab_size,
            seq_len=data.seq_len,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            expansion=self.expansion,
            gated_multiple=self.gated_multiple,
            H_layers=self.H_layers,
            L_layers=self.L_layers,
            H_cycles=self.H_cycles,
            L_cycles=self.L_cycles,
            puzzle_dim=self.puzzle_emb_ndim,
            puzzle_tokens=self.puzzle_emb_len if self.puzzle_emb_ndim else None,
            positions=self.pos_encodings,
            rope_theta=self.rope_theta,
            mixer=self.mixer,
            norm_eps=self.rms_norm_eps,
            halt_max_steps=self.halt_max_steps,
            halt_exploration_prob=self.halt_exploration_prob,
            bootstrap=self.bootstrap,
            shared_network=self.shared_network,
            gradient_span=self.gradient_span,
            forward_dtype=self.forward_dtype,
        )


class PretrainConfig(Section):
    """All keys of pretrain.py; `config/cfg_pretrain.yaml` explains them."""

    arch: ArchConfig = ArchConfig()
    data_path: str = "data/arc-aug-1000"
    global_batch_size: PositiveInt = 768
    epochs: PositiveInt = 100_000
    eval_interval: PositiveInt | None = 10_000
    checkpoint_every_eval: bool = True
    lr: NonNegativeFloat = 1e-4
    lr_min_ratio: float = Field(default=1.0, ge=0, le=1)
    lr_warmup_steps: NonNegativeInt = 2000
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    weight_decay: NonNegativeFloat = 0.1
    puzzle_emb_lr: NonNegativeFloat = 1e-2
    puzzle_emb_weight_decay: NonNegativeFloat = 0.1
    puzzle_emb_sharding: Placing = "data_parallel"
    puzzle_emb_frozen: bool = False
    seed: int = Field(default=0, ge=0, lt=1 << 32)
    project_name: str | None = None
    run_name: str | None = None
    checkpoint_path: str | None = None
    load_checkpoint: str | None = None
    resume: Resume = "auto"
    save_checkpoints: bool = True
    keep_checkpoints: PositiveInt | None = None
    eval_examples: PositiveInt | None = None
    eval_save_outputs: tuple[OutputName, ...] = ()
    max_steps: PositiveInt | None = None
    max_seconds: PositiveFloat | None = None
    log_every: PositiveInt = 20
    log_path: str | None = None
    tensorboard: bool | None = None
    wandb: bool = False
    profile: str | None = None
    compile: bool = False
    cuda_graphs: bool = False
    device: str = "auto"
    threads: PositiveInt | None = None

    @model_validator(mode="after")
    def _intervals_fit(self) -> PretrainConfig:
        if self.epochs % self.interval:
            near = max(1, round(self.epochs / self.interval)) * self.interval
            raise ConfigError(
                "epochs",
                got=f"{self.epochs} with eval_interval {self.interval}",
                allowed="a multiple of eval_interval",
                remedy=f"Set epochs={near}, or another eval_interval.",
            )
        if self.resume == "must" and not self.save_checkpoints:
            raise ConfigError(
                "resume",
                got="must, with save_checkpoints=false",
                allowed="must with checkpoints: without them a run begins and leaves nothing",
                remedy="Leave out save_checkpoints=false, or resume=must.",
            )
        return self

    @property
    def fingerprint(self) -> str:
        """Eight hex digits, the same for settings that train the same model."""
        said = self.model_dump(mode="json", exclude=_OF_NO_EFFECT)
        if said["load_checkpoint"] is None:  # as before there was such a key
            del said["load_checkpoint"]
        return sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def interval(self) -> int:
        """Epochs between two evaluations."""
        return self.epochs if self.eval_interval is None else self.eval_interval

    @property
    def iterations(self) -> int:
        """Evaluations of a whole run."""
        return self.epochs // self.interval

    def learner(self, total_steps: int) -> LearnerConfig:
        """How to learn, when the rates' course ends after so many steps."""
        return LearnerConfig(
            lr=self.lr,
            lr_min_ratio=self.lr_min_ratio,
            lr_warmup_steps=self.lr_warmup_steps,
            betas=(self.beta1, self.beta2),
            weight_decay=self.weight_decay,
            puzzle_emb_lr=self.puzzle_emb_lr,
            puzzle_emb_weight_decay=self.puzzle_emb_weight_decay,
            total_steps=total_steps,
            loss_type=self.arch.loss.loss_type,
            placement=self.puzzle_emb_sharding,
            freeze_table=self.puzzle_emb_frozen,
            ema_decay=self.arch.ema_decay,
            compiled=self.compile,
            graphed=self.cuda_graphs,
            seed=self.seed,
        )


class EvaluateConfig(Section):
    """All keys of evaluate.py; `config/cfg_evaluate.yaml` explains them."""

    checkpoint: str
    data_path: str | None = None
    eval_examples: PositiveInt | Literal["all"] | None = None
    global_batch_size: PositiveInt | None = None
    puzzle_emb_sharding: Placing | None = None
    output: str | None = None
    save_outputs: tuple[OutputName, ...] = ()
    save_outputs_to: str = "."
    compile: bool = False
    device: str = "auto"
    threads: PositiveInt | None = None


def read_pretrain(overrides: Sequence[str], **given: Any) -> PretrainConfig:
    """The settings that a command line asks for.

    Args:
        overrides: `key=value`, as in Hydra.
        given: values of keys, which win.

    Raises:
        ConfigError: a key that there is not, a value that it cannot have, or settings that
            contradict each other.
    """
    settings = compose_file(CONFIG_FOLDER / "cfg_pretrain.yaml", overrides)
    return validate(PretrainConfig, settings | given)


def read_evaluate(overrides: Sequence[str], **given: Any) -> EvaluateConfig:
    """The same of evaluate.py.

    Raises:
        ConfigError: as `read_pretrain`.
    """
    settings = compose_file(CONFIG_FOLDER / "cfg_evaluate.yaml", overrides) | given
    if settings.get("checkpoint") is None:
        raise ConfigError(
            "checkpoint",
            got="nothing",
            allowed="the folder of a run, or of one of its checkpoints",
            remedy="Set checkpoint=checkpoints/...; pretrain.py prints where it saves.",
        )
    return validate(EvaluateConfig, settings)
