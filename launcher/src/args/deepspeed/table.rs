//! The keys that DeepSpeed has, and what becomes of each here.

/// What becomes of a key.
pub enum Rule {
    /// Its number is that of this flag.
    Flag(&'static str),
    /// It is read together with others, in [`words`](super::words), [`schedule`](super::schedule) or
    /// [`batch`](super::batch).
    Read,
    /// It changes nothing here, for this reason; nor do keys of its own, which nobody looks at.
    Ignored(&'static str),
    /// It may have these values, as JSON: what there is here; and what would do instead of others.
    Only(&'static [&'static str], &'static str),
    /// Something that there is not, unless it is switched off; and what would do.
    Off(&'static str),
    /// The same of what its own `enabled` switches on.
    Switched(&'static str),
    /// It has keys of its own.
    Block(&'static [Keys]),
}

/// Keys for which the same holds.
pub struct Keys(pub &'static [&'static str], pub Rule);

use Rule::{Block, Flag, Ignored, Off, Only, Read, Switched};

const FALSE: &[&str] = &["false", "null"];
const PARALLEL: &str = "ranks divide the data, and neither layers nor sequences: leave it away";
const CURRICULUM: &str = "windows have one length, that of --seq: leave it away";
const UNQUANTIZED: &str = "weights are trained as they are: leave it away";
const CHECKPOINTS: &str = "take --checkpoint DIR, with --resume to go on";
const QUANTIZED: &str = "what is sent has the type of --dtype: take false";
const MEASURED: &str = "--metrics FILE has each step's loss, rate, norm and times";
const TRACED: &str =
    "--trace FILE shows where a step goes, and the table at the end what was sent and waited for";
const GATHERED: &str = "what is gathered at stage 3 is a unit at a time, the next one ahead (--prefetch)";
const NO_NVME: &str = "nothing lies on NVMe";
const MODULES: &str = "the model is a Llama that caravan computes itself";
const PINNED: &str = "what is moved between hosts and GPUs always lies in page-locked memory";
const AMP: &str = "take bf16.enabled or fp16.enabled";
const RECOMPUTED: &str =
    "it configures a function that models call: --recompute full computes activations again";

/// All of a configuration.
pub const ALL: &[Keys] = &[
    Keys(&["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"], Read),
    Keys(
        &["managed_gradient_accumulation"],
        Only(&["true"], "micro-batches of a step are counted here: take true"),
    ),
    Keys(&["gradient_clipping"], Flag("--clip")),
    Keys(&["optimizer"], Block(OPTIMIZER)),
    Keys(&["scheduler"], Block(SCHEDULER)),
    Keys(&["zero_optimization"], Block(ZERO)),
    Keys(&["fp16"], Block(FP16)),
    Keys(&["bf16", "bfloat16"], Block(BF16)),
    Keys(&["communication_data_type"], Read),
    Keys(&["data_types"], Block(DATA_TYPES)),
    Keys(
        &["seq_parallel_communication_data_type", "use_data_before_expert_parallelism"],
        Ignored("ranks divide no sequences and no experts"),
    ),
    Keys(&["prescale_gradients", "disable_allgather", "sparse_gradients"], Only(FALSE, "take false")),
    Keys(&["gradient_predivide_factor"], Only(&["1"], "gradients are divided once they are added: take 1.0")),
    Keys(&["gradient_allreduce_op"], Only(&["\"mean\""], "gradients of ranks are averaged: take \"mean\"")),
    Keys(
        &["zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"],
        Ignored("the optimizer is AdamW, which runs at every stage and on the host"),
    ),
    Keys(&["steps_per_print", "log_level"], Ignored("progress is shown as it comes, and --quiet shows none")),
    Keys(&["wall_clock_breakdown", "timers"], Ignored(TRACED)),
    Keys(
        &["memory_breakdown"],
        Ignored("the table at the end has what each rank held, and 'caravan plan' what it will"),
    ),
    Keys(&["dump_state"], Ignored("--metrics FILE begins with every setting")),
    Keys(&["vocabulary_size"], Ignored("the vocabulary is the model's")),
    Keys(&["disable_python_gc"], Ignored("there is no Python")),
    Keys(&["dataloader_drop_last"], Ignored("windows go round: every batch is whole")),
    Keys(&["tensorboard", "csv_monitor", "wandb", "comet"], Ignored(MEASURED)),
    Keys(&["comms_logger"], Ignored(TRACED)),
    Keys(
        &["flops_profiler"],
        Ignored("--metrics FILE has the operations of a token and the tokens of a second"),
    ),
    Keys(&["activation_checkpointing"], Block(ACTIVATIONS)),
    Keys(&["aio"], Ignored(NO_NVME)),
    Keys(&["checkpoint"], Block(CHECKPOINT)),
    Keys(&["pipeline"], Block(PIPELINE)),
    Keys(&["tensor_parallel"], Block(TENSOR_PARALLEL)),
    Keys(&["sequence_parallel_size"], Only(&["1", "null"], PARALLEL)),
    Keys(&["compile"], Block(COMPILE)),
    Keys(&["expert_parallel"], Switched(PARALLEL)),
    Keys(&["torch_autocast", "amp"], Switched(AMP)),
    Keys(
        &["elasticity"],
        Switched(
            "a run has as many ranks as it begins with, and --checkpoint with --resume goes on with others",
        ),
    ),
    Keys(
        &["autotuning"],
        Switched("'caravan plan' says what fits, and 'caravan bench tune' chooses algorithms: leave it away"),
    ),
    Keys(&["data_efficiency", "curriculum_learning", "progressive_layer_drop"], Switched(CURRICULUM)),
    Keys(&["eigenvalue"], Switched(UNQUANTIZED)),
    Keys(&["compression_training", "quantize_training", "weight_quantization"], Off(UNQUANTIZED)),
    Keys(&["sparse_attention"], Off("attention is to all earlier tokens: leave it away")),
    Keys(&["hybrid_engine"], Switched("it trains, and generates one sample at the end: leave it away")),
    Keys(&["nebula"], Switched(CHECKPOINTS)),
    Keys(&["datastates_ckpt"], Off(CHECKPOINTS)),
    Keys(&["graph_harvesting"], Only(FALSE, "--cuda-graphs launches kernels as graphs: take false")),
];

const OPTIMIZER: &[Keys] = &[
    Keys(&["type"], Read),
    Keys(&["legacy_fusion"], Ignored("there is one AdamW")),
    Keys(
        &["params"],
        Block(&[
            Keys(&["lr", "betas", "weight_decay", "torch_adam", "adam_w_mode", "adamw_mode"], Read),
            Keys(&["eps"], Flag("--eps")),
            Keys(
                &["bias_correction"],
                Only(&["true"], "moments are corrected by the step's number: take true"),
            ),
            Keys(&["amsgrad", "maximize"], Only(FALSE, "take false")),
            Keys(&["fp32_optimizer_states"], Only(&["true", "null"], "moments are f32: take true")),
            Keys(
                &["fused", "foreach", "capturable", "differentiable", "set_grad_none"],
                Ignored("there is one AdamW, which updates a bucket at a time"),
            ),
            Keys(
                &["max_grad_norm"],
                Only(&["0", "null"], "the key for it is gradient_clipping, beside the optimizer"),
            ),
        ]),
    ),
];

const SCHEDULER: &[Keys] = &[
    Keys(&["type"], Read),
    Keys(
        &["params"],
        Block(&[
            Keys(
                &[
                    "warmup_min_lr",
                    "warmup_max_lr",
                    "warmup_num_steps",
                    "warmup_type",
                    "total_num_steps",
                    "warmup_min_ratio",
                    "cos_min_ratio",
                ],
                Read,
            ),
            Keys(
                &["last_batch_iteration"],
                Only(&["-1"], "--checkpoint with --resume goes on where a run ended: take -1"),
            ),
        ]),
    ),
];

const ZERO: &[Keys] = &[
    Keys(&["stage"], Flag("--stage")),
    Keys(&["reduce_bucket_size", "stage3_prefetch_bucket_size", "prefetch_bucket_size"], Read),
    Keys(&["cpu_offload", "cpu_offload_param"], Read),
    Keys(&["offload_optimizer"], Block(OFFLOAD_OPTIMIZER)),
    Keys(&["offload_param"], Block(OFFLOAD_PARAM)),
    Keys(
        &["overlap_comm"],
        Ignored(
            "gradients are always reduced while backward computes (--progress thread has a thread for it)",
        ),
    ),
    Keys(&["contiguous_gradients"], Ignored("gradients are always contiguous")),
    Keys(
        &["reduce_scatter", "use_multi_rank_bucket_allreduce"],
        Ignored("gradients are reduced by one canonical sum, which a tuning table or a cost model schedules"),
    ),
    Keys(
        &["allgather_partitions", "allgather_bucket_size", "allgather_size"],
        Ignored("what ranks have updated is gathered in the buckets in which it was reduced"),
    ),
    Keys(&["round_robin_gradients"], Ignored("each rank has its part of every bucket")),
    Keys(&["parameter_alignment"], Ignored("buckets are aligned")),
    Keys(&["sub_group_size"], Ignored("the optimizer updates a bucket at a time")),
    Keys(&["compute_grad_norm"], Ignored("the norm is always computed, and shown")),
    Keys(&["cpu_offload_use_pin_memory"], Ignored(PINNED)),
    Keys(
        &[
            "stage3_param_persistence_threshold",
            "param_persistence_threshold",
            "stage3_model_persistence_threshold",
            "model_persistence_threshold",
            "stage3_max_live_parameters",
            "max_live_parameters",
            "stage3_max_reuse_distance",
            "max_reuse_distance",
            "stage3_module_granularity_threshold",
            "module_granularity_threshold",
            "stage3_use_all_reduce_for_fetch_params",
            "use_all_reduce_for_fetch_params",
            "stage3_allgather_sequential",
            "allgather_sequential",
        ],
        Ignored(GATHERED),
    ),
    Keys(
        &[
            "stage3_gather_16bit_weights_on_model_save",
            "gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
        ],
        Ignored("--save always writes the whole model"),
    ),
    Keys(
        &["load_from_fp32_weights", "elastic_checkpoint", "pipeline_loading_checkpoint"],
        Ignored("--checkpoint keeps f32 weights, from which --resume goes on with any number of ranks"),
    ),
    Keys(
        &[
            "memory_efficient_linear",
            "override_module_apply",
            "ignore_unused_parameters",
            "leaf_module",
            "legacy_stage1",
        ],
        Ignored(MODULES),
    ),
    Keys(
        &["log_trace_cache_warnings", "enable_sanity_checks"],
        Ignored("what a step does is planned before it"),
    ),
    Keys(&["save_muon_momentum_buffer_in_memory"], Ignored(NO_NVME)),
    Keys(
        &["zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"],
        Only(FALSE, QUANTIZED),
    ),
    Keys(&["zeropp_loco_param"], Only(&["null"], QUANTIZED)),
    Keys(&["zero_hpz_partition_size"], Only(&["0", "1"], "parameters are sharded over all ranks: take 1")),
    Keys(&["mics_shard_size"], Only(&["-1", "0"], "states are sharded over all ranks: take -1")),
    Keys(&["mics_hierarchical_params_gather"], Only(FALSE, "take false")),
    Keys(&["zenflow"], Only(&["null"], "every gradient is in the next update: leave it away")),
];

const OFFLOAD_OPTIMIZER: &[Keys] = &[
    Keys(&["device"], Read),
    Keys(&["pin_memory"], Ignored(PINNED)),
    Keys(&["nvme_path", "buffer_count", "fast_init"], Ignored(NO_NVME)),
    Keys(
        &["pipeline_read", "pipeline_write"],
        Ignored("one bucket is updated while others go down and up, always"),
    ),
    Keys(&["ratio"], Only(&["1"], "all of the optimizer's state is offloaded or none: take 1.0")),
    Keys(&["super_offload"], Only(FALSE, "take false")),
    Keys(&["cpuadam_cores_perc"], Ignored("--threads says with how many threads ranks compute")),
];

const OFFLOAD_PARAM: &[Keys] = &[
    Keys(&["device"], Read),
    Keys(&["pin_memory"], Ignored(PINNED)),
    Keys(&["nvme_path", "buffer_count", "buffer_size", "max_in_cpu"], Ignored(NO_NVME)),
];

const FP16: &[Keys] = &[
    Keys(
        &[
            "enabled",
            "loss_scale",
            "initial_scale_power",
            "loss_scale_window",
            "hysteresis",
            "consecutive_hysteresis",
            "min_loss_scale",
        ],
        Read,
    ),
    Keys(&["auto_cast"], Ignored("what a model takes are tokens")),
    Keys(&["fp16_master_weights_and_grads"], Only(FALSE, "master weights and moments are f32: take false")),
];

const BF16: &[Keys] = &[
    Keys(&["enabled"], Read),
    Keys(&["immediate_grad_update"], Ignored("sums over micro-batches are f32 anyway, and rounded once")),
    Keys(
        &["check_grad_overflow"],
        Ignored("a gradient that is not finite always ends the run, and is named"),
    ),
    Keys(
        &["bf16_master_weights_and_grads", "bf16_optimizer_states"],
        Only(FALSE, "master weights and moments are f32: take false"),
    ),
];

const FLOATS: &[&str] = &["null", "\"fp32\"", "\"float32\"", "\"float\"", "\"torch.float32\""];
const DATA_TYPES: &[Keys] = &[
    Keys(
        &["grad_accum_dtype"],
        Only(FLOATS, "sums over micro-batches are f32, and rounded once, to --dtype: take \"fp32\""),
    ),
    Keys(&["param_dtype"], Only(&["null"], AMP)),
    Keys(
        &["buffer_dtype", "keep_in_fp32_modules"],
        Ignored("a Llama has no buffers but positions, which are exact"),
    ),
];

const ACTIVATIONS: &[Keys] = &[
    Keys(
        &["partition_activations", "cpu_checkpointing"],
        Only(
            FALSE,
            "activations stay whole where they are computed: take false, and --recompute full for less of them",
        ),
    ),
    Keys(
        &[
            "contiguous_memory_optimization",
            "number_checkpoints",
            "synchronize_checkpoint_boundary",
            "profile",
        ],
        Ignored(RECOMPUTED),
    ),
];

const CHECKPOINT: &[Keys] = &[
    Keys(
        &["tag_validation", "parallel_write", "checkpoint_serialization", "writer"],
        Ignored("--checkpoint DIR has a form of its own"),
    ),
    Keys(&["load_universal"], Ignored("--resume always takes other numbers of ranks and other stages")),
    Keys(&["use_node_local_storage"], Only(FALSE, "all ranks have to see --checkpoint DIR: take false")),
];

const PIPELINE: &[Keys] = &[
    Keys(&["stages"], Only(&["1"], PARALLEL)),
    Keys(
        &[
            "partition",
            "seed_layers",
            "activation_checkpoint_interval",
            "pipe_partitioned",
            "grad_partitioned",
            "use_reentrant",
        ],
        Ignored("there is no pipeline"),
    ),
];

const TENSOR_PARALLEL: &[Keys] = &[
    Keys(&["autotp_size"], Only(&["0", "1"], PARALLEL)),
    Keys(
        &[
            "dtype",
            "tp_overlap_comm",
            "vocab_parallel_lm_head",
            "vocab_parallel_ce_backend",
            "tensor_parallel",
            "tp",
            "injection_policy_tuple",
            "partition_config",
            "preset_model",
            "keep_module_on_host",
            "replace_with_kernel_inject",
            "kernel_inject",
        ],
        Ignored("ranks divide no layers"),
    ),
];

const COMPILE: &[Keys] = &[
    Keys(&["deepcompile"], Only(FALSE, "the model's kernels are written by hand: take false")),
    Keys(
        &[
            "autoep_non_moe",
            "free_activation",
            "free_activation_threshold",
            "offload_activation",
            "offload_activation_pin_memory",
            "offload_opt_states",
            "double_buffer",
            "symmetric_memory",
            "debug_log",
            "offload_parameters",
            "sync_before_reduce",
            "sync_after_reduce",
            "sync_before_allgather",
            "sync_after_allgather",
            "keep_int_input_tensors",
            "keep_all_input_tensors",
            "passes",
        ],
        Ignored("nothing is compiled by PyTorch"),
    ),
];
