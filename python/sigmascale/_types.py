"""Types of what results hold. Keys and values are those of the command's JSON."""

import sys
from typing import Literal

if sys.version_info >= (3, 11):
    from typing import NotRequired, TypedDict
else:
    from typing_extensions import NotRequired, TypedDict

Policy = Literal["geometry", "geometry-c-star", "auto-c", "delayed-paper", "delayed-te", "current"]
Granularity = Literal["head", "layer"]
Pooling = Literal["model", "layer", "head"]
AmaxAlgorithm = Literal["max", "most-recent"]
Operand = Literal["logit", "q", "k", "v", "o"]
AlarmKind = Literal[
    "delta-bias",
    "repeated-maxima",
    "saturation",
    "growth",
    "logit-limit",
    "bound-exceeded",
    "entropy-collapse",
    "loss-scale",
    "skipped-steps",
    "loss-spike",
    "non-finite-loss",
]
EngineName = Literal["vllm", "sglang", "trtllm", "mistralrs"]
ExportEngineName = Literal["vllm", "sglang", "mistralrs"]
Verdict = Literal["safe", "overflow", "mismatch", "invalid", "missing", "not-loaded", "unknown"]
Outcome = Literal["safe", "unknown", "not-proven", "not-safe"]


class Biases(TypedDict):
    """Which projections have a bias."""

    q: bool
    k: bool
    v: bool


class Latent(TypedDict):
    """Sizes of multi-head latent attention."""

    q_rank: int | None
    kv_rank: int
    d_nope: int
    d_rope: int
    d_value: int
    q_factor: float
    kv_factor: float


class Model(TypedDict):
    """A model. ``n_q_heads``, ``n_kv_heads`` and ``d_head`` are lists, one entry per layer, where layers differ."""

    name: str
    family: str
    layers: int
    d_model: int
    n_q_heads: int | list[int]
    n_kv_heads: int | list[int]
    d_head: int | list[int]
    norm: Literal["layer-norm", "rms-norm", "none"]
    rope: Literal["half-split", "interleaved"] | None
    qk_norm: Literal["per-head", "joint"] | None
    mla: NotRequired[Latent]
    bias: Biases
    bounded_positions: NotRequired[int]
    fp8_inputs: NotRequired[bool]


class UnionBound(TypedDict):
    """What the union bound counts."""

    delta: float
    seq_len: int
    batch: int
    steps: int


class CalibrationTail(UnionBound):
    """The same with the share of the E4M3 range that a logit bound is mapped onto."""

    eta: float


class CStar(TypedDict):
    """The paper's constants."""

    gamma: float
    c_star: float
    c_rank_agnostic: float
    improvement: float
    gamma_beta: float
    c_star_beta: float


class ChosenC(TypedDict):
    """A constant in place of ``c_star`` and its failure probability."""

    c: float
    delta: float


class CenterMethod(TypedDict):
    """Where centers of keys and values come from."""

    k: Literal["none", "weights", "mean", "minimax"]
    v: Literal["none", "weights", "mean", "minimax"]
    positions: int
    burn_in: int
    follow: float


class Method(TypedDict):
    """How the layers were computed."""

    bound: Literal["worst-case", "rank-aware", "spectrum"] | None
    estimator: Literal["gram", "power", "power-summed"]
    iterations: NotRequired[int]
    rotation: bool
    granularity: Granularity
    as_paper: bool
    soft_cap: NotRequired[float]
    c: float | None
    centers: NotRequired[CenterMethod]
    layer_norm_mean_limit: NotRequired[float]


class CenterProfile(TypedDict):
    """What centers change, one entry per KV head. `positions`: the bounds hold below; None: at all."""

    bias_share: list[float]
    k_bound: list[float]
    k_position_bound: list[float]
    k_centered_bound: list[float]
    v_bound: list[float] | None
    v_centered_bound: list[float] | None
    positions: int | None
    k_centered_descale: list[float]
    v_centered_descale: list[float] | None
    c: list[list[float]] | None
    m: list[list[float]] | None


class MlaProfile(TypedDict):
    """What the cache of latent attention needs."""

    cache_descale: float
    absorbed_q_descale: list[float]
    latent_bound: float
    k_pe_bound: float


class PowerProfile(TypedDict):
    """What an estimate by power iteration is worth."""

    lower_bound: bool
    residual: float
    certified_inflation: float | None


class HeadProfile(TypedDict):
    """One query head."""

    head: int
    kv_head: int
    sigma: float | None
    sigma_raw: float | None
    sigma_rope: float | None
    sigma_certified: float | None
    frobenius: float | None
    stable_rank: float | None
    power: NotRequired[PowerProfile]
    bias_constant: float | None
    bound_naive: float | None
    bound_exact: float | None
    bound_rounded: float | None
    bound_rank_aware: float | None
    bound_spectrum: float | None


class LayerProfile(TypedDict):
    """One layer: descales of q, k, v and o have one entry per KV head, logit descales one per query head."""

    layer: int
    number: int
    sigma: float | None
    sigma_sum: float | None
    logit_bound: float
    logit_descale: float
    logit_descales: NotRequired[list[float]]
    q_descale: list[float] | None
    k_descale: list[float] | None
    v_descale: list[float] | None
    o_descale: list[float] | None
    center: NotRequired[CenterProfile]
    mla: NotRequired[MlaProfile]
    heads: NotRequired[list[HeadProfile]]


class Statistics(TypedDict):
    """Smallest, mean and largest value over the heads of a layer."""

    min: float
    mean: float
    max: float


class HeadInspection(TypedDict):
    """One query head."""

    head: int
    kv_head: int
    sigma: float | None
    sigma_raw: float | None
    sigma_rope: float | None
    rope_ratio: float | None
    frobenius: float | None
    stable_rank: float | None
    bound_exact: float | None
    bound_rounded: float | None


class LayerInspection(TypedDict):
    """One layer: statistics over its heads, then the heads."""

    layer: int
    number: int
    sigma: Statistics | None
    sigma_raw: Statistics | None
    stable_rank: Statistics | None
    rope_ratio: Statistics | None
    sigma_sum: float | None
    bound_exact: float | None
    bound_rounded: float | None
    mla: NotRequired[MlaProfile]
    heads: list[HeadInspection]


class Tokens(TypedDict):
    """The text of a run."""

    file: str
    tokens: int
    sequences: int


class Parameters(TypedDict):
    """A policy with its parameters; which keys there are depends on the policy."""

    policy: Policy
    eta: NotRequired[float]
    granularity: NotRequired[Granularity]
    burn_in: NotRequired[int]
    quantile: NotRequired[float]
    kappa: NotRequired[float]
    pooling: NotRequired[Pooling]
    max_restarts: NotRequired[int]
    history: NotRequired[int]
    initial: NotRequired[float]
    margin: NotRequired[float]
    algorithm: NotRequired[AmaxAlgorithm]


class Quantiles(TypedDict):
    """Quantiles over layers and steps."""

    p10: float
    median: float
    p90: float


class Slack(Statistics):
    """Worst-case bound over the observed maximum."""

    tensor: Operand
    count: int


class PolicySummary(TypedDict):
    """What became of one policy."""

    policy: Policy
    layers: int
    overflow_layers: int
    overflow_steps: int
    clipped_steps: int
    first_bad_step: int | None
    overflow_values: int
    values: int
    max_scaled: float
    overshoot: Quantiles | None
    utilization: Quantiles
    sqnr_db: float | None
    sqnr_worst_step_db: float | None
    output_bias: float | None
    softmax_kl: float | None
    slack: NotRequired[list[Slack]]
    fallbacks: int
    assumption: str | None


class Unavailable(TypedDict):
    """A policy that cannot run on this model."""

    policy: Policy
    reason: str


class TraceRow(TypedDict):
    """One step of one policy in one layer."""

    step: int
    policy: Policy
    layer: int
    max_logit: float
    descale: float
    max_scaled: float
    overflow: int
    tensor: Operand
    logit_descale: float | None
    q_descale: float | None
    k_descale: float | None
    v_descale: float | None
    sqnr_db: float | None
    output_bias: float | None
    softmax_kl: float | None


class Alarm(TypedDict):
    """An alarm; ``layer`` and ``head`` are None where it concerns the whole run, ``cleared`` while it is up."""

    kind: AlarmKind
    layer: int | None
    head: int | None
    since: int
    raised: int
    cleared: int | None
    value: float | None
    limit: float | None
    message: str
    source: str


class Advice(TypedDict):
    """What to do about one kind of alarm, in these layers."""

    kind: AlarmKind
    layers: list[int]
    action: str
    source: str


class Thresholds(TypedDict):
    """Thresholds of the alarms."""

    logit_limit: float
    window: int
    hold: int
    growth: float
    repeated: float
    bias: float
    false_alarms: float
    entropy: float
    saturated: float
    loss_scale: int
    skipped: float
    loss: float


class Span(TypedDict):
    """First and last value of a quantity, and its growth per step over the last window."""

    first: float
    last: float
    per_step: float | None


class HeadReport(TypedDict):
    """One query head of a run; what was not recorded is None."""

    layer: int
    head: int
    w_q: Span | None
    sigma: Span | None
    growth: float | None
    bound: float | None
    logit_max: float | None
    logit_limit: float
    reaches_limit: int | None
    repeated: float | None
    delta_bias: float | None
    entropy: float | None
    utilization: float | None
    saturated: float | None


class SkipLayers(TypedDict):
    """Layers that are kept out of an FP8 cache."""

    numbers: list[int]
    sliding_window: bool


class Serving(TypedDict):
    """What a server is started with."""

    context: int | None
    skip: SkipLayers
    kv: Literal["fp8", "nvfp4", "nvfp4_4over6"]


class Unjudged(TypedDict):
    """Tensors or files that attention reads, or may read, and that were not judged."""

    what: str
    why: str


class OperandCertificate(TypedDict):
    """The scales of one operand in a layer, and the worst case over what they cover."""

    scale: list[float]
    needed: list[float]
    cast_at_one: bool
    safe: bool
    load: float


class LayerCertificate(TypedDict):
    """One layer of an export; ``v`` is None where it has no bound."""

    layer: int
    kept: bool
    q: OperandCertificate
    k: OperandCertificate
    v: OperandCertificate | None


class AuditEntry(TypedDict):
    """One scale as an engine would use it, and the scale that the weights need."""

    scale: float | None
    needed: float | None
    verdict: Verdict
    factor: float | None
    stored: float | None
    why: str


class LayerMaxima(TypedDict):
    """The largest values of q, k and v that a text reached in one layer."""

    layer: int
    q: float
    k: float
    v: float


class Observed(TypedDict):
    """What a text reached in a model's own forward."""

    tokens: Tokens
    sequences: int
    seq_len: int
    layers: list[LayerMaxima]


class LayerAudit(TypedDict):
    """One layer: an entry per scale of q, k and v."""

    layer: int
    q: list[AuditEntry]
    k: list[AuditEntry]
    v: list[AuditEntry]
