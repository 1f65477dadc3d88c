"""Every field of a cem_jax configuration, once, with its default and meaning.

Other configs start from `get_config()` here and change fields. On the command line any field can
be set by its dotted name, for example `--config.optimizer.learning_rate=0.001`.
"""

import ml_collections
from ml_collections import config_dict


def get_config() -> ml_collections.ConfigDict:
    """Return the full CEM model at a small size; defaults are the paper's where it states them."""
    c = ml_collections.ConfigDict()
    c.seed = 0  # parameter initialisation

    c.model = m = ml_collections.ConfigDict()
    m.vocab_size = 32_000  # rows of the embedding; at least as many as the tokenizer has pieces
    m.dim = 256  # D, width of the residual stream
    m.layers = 4  # L, blocks of one attention and one MLP sublayer
    # prenorm | normalized: Algorithm 1 as printed, which replaces x by RMSNorm(x)
    m.residual = "prenorm"
    # Norm before each step: shared (the sublayer's weights) | separate | weightless | none
    m.step_norm = "shared"
    m.norm_gradient = "at_u"  # at_u | scaled (times the norm's weight) | full (through the norm)
    m.norm_eps = 1e-6
    m.init_std = 0.02  # every weight matrix and embedding ~ N(0, init_std²)
    m.tie_embeddings = False  # output head = embedding
    m.scan_layers = True  # compile one block for all layers; False unrolls (6–8 % faster on CPU)
    # Recompute in the backward pass: none | dots (keep matmuls and attention) | attention (keep its
    # output alone) | full. XLA on CPU undoes it unless layers are scanned.
    m.remat = "none"

    m.attention = a = ml_collections.ConfigDict()
    a.kind = "cem"  # cem | llama
    a.heads = 4  # K; the head dimension is R = D / K
    a.steps = 2  # T; llama: how often the layer is applied
    a.step_size = 1.0  # η
    a.learn_step_size = False
    a.diagonal = "shared"  # d in A_k = diag(d) + W_Qᵀ W_K: none | shared | per_head
    a.diagonal_init = 0.0
    a.diagonal_in_update = False  # False: Algorithm 1; True: the exact gradient
    a.position = "alibi"  # alibi | rope | none, for llama too
    a.alibi_slopes = "power_of_two"  # power_of_two: m_k = 2^-k | press: 2^(-8k/K)
    a.self_bias = True  # one learned logit β_k per head, added for j = i
    a.rope_base = 10_000.0
    a.tau = "sqrt_head_dim"  # sqrt_head_dim | sqrt_model_dim | a decimal, as a string
    a.preconditioner = "diagonal_low_rank"  # none | diagonal | diagonal_low_rank
    a.preconditioner_rank = 4
    a.preconditioner_form = "symmetric"  # symmetric: left·rightᵀ + right·leftᵀ | psd: left·leftᵀ
    a.preconditioner_init = "paper"  # paper: diagonal softplus(1) = 1.3133 | identity: 1
    a.preconditioner_heads = "per_head"  # per_head | shared: one P for all heads
    a.update = "autodiff"  # autodiff: jax.grad of the energy | closed_form
    a.implementation = "auto"  # auto: fused on TPU, GPU | dense | blockwise | pallas: fused
    a.block_sizes = config_dict.placeholder(tuple)  # of queries and keys; None: chosen
    a.remat_steps = False  # recompute each step, except its attention, in the backward pass

    m.mlp = f = ml_collections.ConfigDict()
    f.kind = "cem"  # cem | gated
    f.dim = 688  # M
    f.steps = 2
    f.step_size = 1.0
    f.learn_step_size = False
    f.activation = "silu"  # silu | gelu (erf) | relu
    f.preconditioner = "diagonal_low_rank"
    f.preconditioner_rank = 16
    f.preconditioner_form = "symmetric"
    f.preconditioner_init = "paper"
    f.update = "autodiff"
    f.remat_steps = False

    c.data = d = ml_collections.ConfigDict()
    d.path = ""  # directory written by `cem prepare`, or its URL, fetched into ~/.cache/cem_jax
    # Instead of path: "path=weight" strings, sampled by weight; path#source names one source
    d.mixture = ()
    d.context = 2048  # J, tokens per window
    d.separator = "bos"  # between documents: bos | eos | both; must be the dataset's own
    d.document_mask = False  # True: attention stays within each document
    d.shuffle_seed = 0
    d.prefetch = 2  # batches made ahead of the step, at least; small ones: about 32 MB of them

    c.optimizer = o = ml_collections.ConfigDict()  # AdamW, Table 2
    o.learning_rate = 0.002
    o.b1 = 0.9
    o.b2 = 0.95
    o.eps = 1e-9
    o.weight_decay = 0.1
    o.decay_mask = "matrices"  # matrices (and embeddings) | all
    o.clip_norm = 1.0
    o.warmup_fraction = 0.05
    o.final_fraction = 0.1  # cosine decay to this share of the peak
    o.z_loss = 0.0

    c.train = t = ml_collections.ConfigDict()
    t.steps = config_dict.placeholder(int)  # set either steps …
    t.tokens = config_dict.placeholder(int)  # … or tokens, which hold even if the batch changes
    t.global_batch = 128  # sequences per update
    t.microbatch = config_dict.placeholder(int)  # sequences at a time; None: all at once
    t.compute_dtype = "bfloat16"  # bfloat16 | float32 | float64; parameters stay float32
    t.max_bad_steps = 10  # consecutive non-finite steps before the run stops
    # With several processes: minutes without progress before reporting which process is missing
    t.stall_minutes = 30.0

    c.mesh = p = ml_collections.ConfigDict()  # devices per axis; -1, for one: those left
    p.data = -1
    p.fsdp = 1
    p.tensor = 1
    p.context = 1

    c.checkpoint = k = ml_collections.ConfigDict()
    k.every = 1000  # steps between checkpoints
    k.keep = 2  # how many of the newest are kept
    k.keep_best = True  # also keep the best by validation loss
    k.keep_every = config_dict.placeholder(int)  # steps between checkpoints kept for good
    k.every_minutes = config_dict.placeholder(float)  # also save after this many minutes
    k.grace_seconds = 240.0  # SIGTERM to exit, saved or not; set below the scheduler's limit

    c.eval = e = ml_collections.ConfigDict()
    e.every = 1000  # steps between validations during training
    e.split = "validation"
    e.batches = config_dict.placeholder(int)  # at most, during training; None: the whole split

    c.log = g = ml_collections.ConfigDict()
    g.every = 10  # steps between metrics lines
    g.energies_every = 0  # steps between `energies` lines (docs/metrics.md); 0: none
    g.profile_steps = ()  # (first, last) step of a profiler trace
    g.tensorboard = True
    # directory; None: $JAX_COMPILATION_CACHE_DIR, else cem_jax/compile in the XDG cache directory
    g.compile_cache = config_dict.placeholder(str)
    return c


def llama_parameters(c: ml_collections.ConfigDict) -> int:
    """Count a Llama's parameters at these sizes: embedding, head, 4D² + 3DM per layer, norms."""
    d, layers, hidden = c.model.dim, c.model.layers, c.model.mlp.dim
    matrices = 4 * d * d + 3 * d * hidden
    norms = 2 * d
    return 2 * c.model.vocab_size * d + layers * (matrices + norms) + d
