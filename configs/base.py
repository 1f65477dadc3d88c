"""Every field of a cem_jax configuration, once, with its default and meaning.

Other configs start from `get_config()` here and change fields. On the command line any field can
be set with a dotted flag, for example `--config.optimizer.learning_rate=0.001`.
"""

import ml_collections
from ml_collections import config_dict


def get_config() -> ml_collections.ConfigDict:
    """The full CEM model at a small size; the defaults are the paper's where it states them."""
    c = ml_collections.ConfigDict()
    c.seed = 0  # parameter initialisation

    c.model = m = ml_collections.ConfigDict()
    m.vocab_size = 32_000  # rows of the embedding; at least the tokenizer's size
    m.dim = 256  # D, width of the residual stream
    m.layers = 4  # L, blocks of one attention and one MLP sublayer
    m.residual = "prenorm"  # prenorm | normalized: Algorithm 1 as printed, x replaced by RMSNorm(x)
    m.step_norm = "shared"  # norm before each step: shared | separate | weightless | none
    m.norm_gradient = "at_u"  # at_u | scaled (times the norm's weight) | full (through the norm)
    m.norm_eps = 1e-6
    m.init_std = 0.02  # every weight matrix and embedding ~ N(0, init_std²)
    m.tie_embeddings = False  # output head = embedding
    m.scan_layers = True  # one compiled block for all layers; False unrolls (6–8 % faster on CPU)
    # Recompute in the backward pass: none | dots (keep matmuls and attention) | attention (keep its
    # output alone) | full. XLA on CPU undoes it where layers are not scanned.
    m.remat = "none"

    m.attention = a = ml_collections.ConfigDict()
    a.kind = "cem"  # cem | llama
    a.heads = 4  # K; the head dimension is R = D / K
    a.steps = 2  # T; for llama: plain reuse of the layer
    a.step_size = 1.0  # η
    a.learn_step_size = False
    a.diagonal = "shared"  # d in A_k = diag(d) + W_Qᵀ W_K: none | shared | per_head
    a.diagonal_init = 0.0
    a.diagonal_in_update = False  # False: Algorithm 1; True: the exact gradient
    a.position = "alibi"  # alibi | rope | none (llama: the same)
    a.alibi_slopes = "power_of_two"  # m_k = 2^-k | press: 2^(-8k/K)
    a.self_bias = True  # one learned logit β_k a head for j = i
    a.rope_base = 10_000.0
    a.tau = "sqrt_head_dim"  # sqrt_head_dim | sqrt_model_dim | a decimal, as a string
    a.preconditioner = "diagonal_low_rank"  # none | diagonal | diagonal_low_rank
    a.preconditioner_rank = 4
    a.preconditioner_form = "symmetric"  # left·rightᵀ + right·leftᵀ | psd: left·leftᵀ
    a.preconditioner_init = "paper"  # diagonal softplus(1) = 1.3133 | identity: 1
    a.preconditioner_heads = "per_head"  # per_head | shared: one P for all heads
    a.update = "autodiff"  # jax.grad of the energy | closed_form
    a.implementation = "auto"  # auto: fused on TPU and GPU | dense | blockwise | pallas: fused
    a.block_sizes = config_dict.placeholder(tuple)  # (query block, key block); None: chosen
    a.remat_steps = False  # recompute each of the T steps, but its attention, in the backward pass

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
    d.path = ""  # a directory written by `cem prepare`, or its URL: fetched into ~/.cache/cem_jax
    d.mixture = ()  # instead of path: "path=weight" strings, sampled by weight; path#source, too
    d.context = 2048  # J, tokens a window
    d.separator = "bos"  # between documents: bos | eos | both; must be the dataset's
    d.document_mask = False  # True: attention stays within a document
    d.shuffle_seed = 0
    d.prefetch = 2  # batches made ahead of the step, at least; small ones: some 32 MB of them

    c.optimizer = o = ml_collections.ConfigDict()  # AdamW, Table 2
    o.learning_rate = 0.002
    o.b1 = 0.9
    o.b2 = 0.95
    o.eps = 1e-9
    o.weight_decay = 0.1
    o.decay_mask = "matrices"  # matrices (and embeddings) | all
    o.clip_norm = 1.0
    o.warmup_fraction = 0.05
    o.final_fraction = 0.1  # cosine decay down to this share of the peak
    o.z_loss = 0.0

    c.train = t = ml_collections.ConfigDict()
    t.steps = config_dict.placeholder(int)  # set either steps …
    t.tokens = config_dict.placeholder(int)  # … or tokens, also where the batch changes meanwhile
    t.global_batch = 128  # sequences an update
    t.microbatch = config_dict.placeholder(int)  # sequences at a time; None: all at once
    t.compute_dtype = "bfloat16"  # bfloat16 | float32 | float64; parameters stay float32
    t.max_bad_steps = 10  # consecutive non-finite steps before the run stops
    t.stall_minutes = (
        30.0  # with several processes: without progress, until they say who is missing
    )

    c.mesh = p = ml_collections.ConfigDict()  # devices per axis; one may be -1: what is left
    p.data = -1
    p.fsdp = 1
    p.tensor = 1
    p.context = 1

    c.checkpoint = k = ml_collections.ConfigDict()
    k.every = 1000  # steps
    k.keep = 2  # newest checkpoints kept
    k.keep_best = True  # keep the best by validation loss beside them
    k.keep_every = config_dict.placeholder(int)  # save at multiples of so many steps, keep for ever
    k.every_minutes = config_dict.placeholder(float)  # and after so many minutes
    k.grace_seconds = 240.0  # from SIGTERM to the end, saved or not: less than the scheduler's

    c.eval = e = ml_collections.ConfigDict()
    e.every = 1000  # steps between validations during training
    e.split = "validation"
    e.batches = config_dict.placeholder(int)  # at most so many during training; None: whole split

    c.log = g = ml_collections.ConfigDict()
    g.every = 10  # steps between metrics lines
    g.energies_every = 0  # and between `energies` lines (docs/metrics.md); 0: none
    g.profile_steps = ()  # (first, last) step of a profiler trace
    g.tensorboard = True
    g.compile_cache = config_dict.placeholder(str)  # directory; None: ~/.cache/cem_jax/compile
    return c


def llama_parameters(c: ml_collections.ConfigDict) -> int:
    """Parameters of a Llama with the sizes in `c`: untied embeddings, 4D² + 3DM a layer, norms."""
    d, layers, hidden = c.model.dim, c.model.layers, c.model.mlp.dim
    matrices = 4 * d * d + 3 * d * hidden
    norms = 2 * d
    return 2 * c.model.vocab_size * d + layers * (matrices + norms) + d
