"""Suggestions for names that are not fields of the configuration."""

import difflib
from collections.abc import Collection, Iterable

_ALIKE = 0.75  # least difflib ratio of names' last parts: one or two letters in five may differ
_WHOLE = 0.85  # least ratio of whole dotted names
_MOST = 3  # suggestions; more would not help

# Other programs' names for our fields. If several match, those in the section the user typed win.
SYNONYMS = {
    field: tuple(words.split())
    for field, words in {
        "seed": "random_seed rng_seed",
        "model.vocab_size": "vocab n_vocab vocabulary vocabulary_size",
        "model.dim": "d_model hidden_size hidden_dim n_embd embed_dim embedding_dim emb_dim width "
        "model_dim",
        "model.layers": "depth layer n_layer n_layers num_layers num_hidden_layers num_blocks",
        "model.norm_eps": "rms_norm_eps layer_norm_eps layernorm_eps epsilon",
        "model.init_std": "initializer_range init_scale",
        "model.tie_embeddings": "tie_word_embeddings tied_embeddings tie_weights weight_tying",
        "model.remat": "gradient_checkpointing activation_checkpointing checkpointing",
        "model.attention.heads": "head n_head n_heads num_heads num_attention_heads",
        "model.attention.rope_base": "rope_theta theta",
        "model.attention.tau": "temperature",
        "model.attention.position": "positional_encoding position_embedding pos_emb",
        "model.attention.steps": "t n_steps num_steps recursion",
        "model.mlp.steps": "t n_steps num_steps recursion",
        "model.mlp.dim": "d_ff d_ffn dim_ff ffn_dim mlp_dim intermediate_size feedforward_dim "
        "hidden_size hidden_dim width",
        "model.mlp.activation": "act act_fn hidden_act activation_function nonlinearity",
        "data.path": "dataset data_path data_dir dir directory",
        "data.mixture": "weights datasets",
        "data.context": "seq_len seq_length sequence_length max_seq_len max_seq_length max_length "
        "max_position_embeddings block_size context_length context_size n_ctx n_positions",
        "data.shuffle_seed": "data_seed",
        "optimizer.learning_rate": "lr max_lr peak_lr base_lr",
        "optimizer.b1": "beta1 beta_1 adam_beta1",
        "optimizer.b2": "beta2 beta_2 adam_beta2",
        "optimizer.eps": "epsilon adam_eps adam_epsilon",
        "optimizer.weight_decay": "wd decay l2",
        "optimizer.clip_norm": "clip grad_clip gradient_clip gradient_clipping max_grad_norm",
        "optimizer.warmup_fraction": "warmup warmup_steps warmup_ratio warmup_iters",
        "optimizer.final_fraction": "min_lr final_lr end_lr min_lr_ratio",
        "train.steps": "max_steps num_steps n_steps total_steps train_steps num_train_steps "
        "max_iters iterations",
        "train.tokens": "max_tokens num_tokens total_tokens train_tokens",
        "train.global_batch": "batch batch_size global_batch_size train_batch_size",
        "train.microbatch": "micro_batch micro_batch_size microbatch_size per_device_batch_size "
        "accumulation grad_accum gradient_accumulation gradient_accumulation_steps",
        "train.compute_dtype": "dtype precision",
        "mesh.data": "dp data_parallel",
        "mesh.tensor": "tp tensor_parallel model_parallel",
        "mesh.context": "cp sp context_parallel sequence_parallel",
        "checkpoint.every": "save_every save_interval save_steps checkpoint_every",
        "checkpoint.keep": "max_to_keep save_total_limit",
        "eval.every": "eval_every eval_interval eval_steps",
        "eval.batches": "batch eval_iters eval_batches",
        "log.every": "log_every log_interval logging_steps",
        "log.compile_cache": "compilation_cache cache_dir jax_compilation_cache_dir",
    }.items()
}


def unknown(name: str, fields: Collection[str]) -> str:
    """Return the message for a name that is not among the dotted `fields`, with suggestions."""
    inside = [field[len(name) + 1 :] for field in fields if field.startswith(name + ".")]
    if inside:
        children = dict.fromkeys(field.partition(".")[0] for field in inside)
        return f"{name}: a section, not a field; it holds {', '.join(children)}"
    meant = _meant(name, fields)
    hint = f"; did you mean {' or '.join(meant)}?" if 0 < len(meant) <= _MOST else ""
    return f"{name}: no such field{hint}"


def _meant(name: str, fields: Collection[str]) -> list[str]:
    """Return the fields that a user who writes `name` may mean."""
    section, _, last = name.lower().rpartition(".")
    ends: dict[str, list[str]] = {}
    for field in fields:
        ends.setdefault(field.rpartition(".")[2], []).append(field)
    if last in ends:
        close = difflib.get_close_matches(name, ends[last], n=1, cutoff=_WHOLE)
        return close or _nearest(section, ends[last])
    if same := [field for field, words in SYNONYMS.items() if last in words]:
        return _nearest(section, same)
    close = difflib.get_close_matches(last, ends, n=1, cutoff=_ALIKE)
    return _nearest(section, ends[close[0]]) if close else []


def _nearest(section: str, found: Iterable[str]) -> list[str]:
    """Return those of the fields that are in the section itself, else those below it, else all."""
    found = list(found)
    own = [field for field in found if field.rpartition(".")[0] == section]
    return own or [field for field in found if field.startswith(f"{section}.")] or found
