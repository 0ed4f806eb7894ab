//! A training run in words: for other ranks, for people, and for the metrics file.

use crate::agree::Signature;
use crate::bench::tuning;
use crate::files;
use crate::human;
use crate::machine::{Machine, versions};
use crate::plan::TrainPlan;
use crate::tokenizer::Tokenizer;
use models::Recompute;
use models::hf::rope_scaling;
use serde_json::{Value, json};
use zero::Placement;

/// What must be the same on every rank: who differs would compute something else, or make other calls.
pub fn signature(plan: &TrainPlan) -> Signature {
    let model = &plan.model.config;
    let (rate, adamw) = (&plan.rate, &plan.zero.adamw);
    vec![
        ("command", "train".to_owned()),
        ("version", env!("CARGO_PKG_VERSION").to_owned()),
        ("--model", format!("{model:?}")),
        ("weights of --model", plan.model.fingerprint()),
        ("--tokenizer", plan.tokenizer.as_ref().map_or("not known".to_owned(), Tokenizer::fingerprint)),
        ("--data", plan.feed.fingerprint()),
        ("--device", plan.device.name().to_owned()),
        ("--attention", plan.attention().unwrap_or("none").to_owned()),
        ("--offload", plan.offload().to_owned()),
        ("--cuda-graphs", plan.cuda_graphs.to_string()),
        ("--stage", plan.zero.stage.level().to_string()),
        ("--dtype", plan.dtype.name().to_owned()),
        ("--matmul-precision", plan.batch.matmul_precision(plan.dtype).unwrap_or("none").to_owned()),
        ("--steps", plan.steps.to_string()),
        ("--micro-batch", plan.batch.rows.to_string()),
        ("--accumulate", plan.zero.accumulate.to_string()),
        ("--recompute", recompute(plan).to_owned()),
        ("--seq", plan.batch.length.to_string()),
        ("--lr", rate.peak.to_string()),
        ("--min-lr", rate.floor.to_string()),
        ("--warmup", rate.warmup.to_string()),
        ("--schedule", rate.shape.name().to_owned()),
        ("--weight-decay", adamw.weight_decay.to_string()),
        ("--beta1", adamw.beta1.to_string()),
        ("--beta2", adamw.beta2.to_string()),
        ("--eps", adamw.eps.to_string()),
        ("--clip", plan.zero.clip.unwrap_or(0.0).to_string()),
        ("--seed", plan.seed.to_string()),
        ("--order", plan.order.name().to_owned()),
        ("--eval-every", plan.eval_every.to_string()),
        ("--eval-tokens", plan.eval_tokens.to_string()),
        ("--metrics", files::wanted(plan.metrics.as_deref())),
        ("--save", files::wanted(plan.save.as_deref())),
        ("--prefetch", plan.zero.prefetch.to_string()),
        ("--progress", plan.progress.name().to_owned()),
        ("--bucket-size", plan.zero.bucket_bytes.to_string()),
        ("--sample", plan.sample.to_string()),
    ]
}

/// As `--recompute` names it.
fn recompute(plan: &TrainPlan) -> &'static str {
    match plan.batch.recompute {
        Recompute::Full => "full",
        Recompute::None => "none",
        Recompute::NoBackward => "no backward",
    }
}

/// One line that says what is about to happen.
pub(super) fn headline(plan: &TrainPlan) -> String {
    let micro = match plan.zero.accumulate {
        1 => String::new(),
        n => format!(" x {n} micro-batches"),
    };
    let weights = match &plan.model.weights {
        // Which is all that is saved of a run.
        Some(weights) => format!("weights of {}, a new optimizer", weights.dir().display()),
        None => "new weights".to_owned(),
    };
    // Which text tokens are, or why nobody can tell.
    let tokenizer = match (&plan.tokenizer, plan.sample) {
        (Some(tokenizer), _) => format!(", tokenizer {}", tokenizer.name()),
        (None, 0) => String::new(),
        (None, _) => ", tokenizer not known: no sample will be shown (--tokenizer names it)".to_owned(),
    };
    let (trained, held_out) = (plan.steps.saturating_mul(plan.step_tokens), plan.feed.held_out_tokens());
    let evaluated = match held_out > trained {
        true => format!(
            "\nthe evaluation at the end takes all {} tokens that are held out, and training {}: a lower --val-fraction holds \
             out fewer",
            human::count(held_out as f64),
            human::count(trained as f64)
        ),
        false => String::new(),
    };
    format!(
        "training {} ({} parameters, {weights}) on {} x {}{} over {}, ZeRO stage {}, {}{}{}\n\
         {}{tokenizer}; {} of {}{micro} x {} sequences x {} tokens{evaluated}",
        plan.model.name,
        human::count(plan.model.config.parameters() as f64),
        several(plan.ranks.world, "rank"),
        several(plan.ranks.threads, "thread"),
        plan.device.describe(),
        plan.ranks.asked(),
        plan.zero.stage,
        plan.dtype.name(),
        plan.batch.products_remark(&plan.device),
        match plan.zero.placement {
            Placement::Offloaded => ", optimizer on the host",
            _ => "",
        },
        plan.feed.describe(),
        several(plan.steps, "step"),
        several(plan.ranks.world, "rank"),
        plan.batch.rows,
        plan.batch.length
    )
}

/// `1 rank`, `2 ranks`.
fn several(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// The configuration of the run, the machine and the versions.
pub(super) fn run(plan: &TrainPlan) -> Value {
    let model = &plan.model.config;
    json!({
        "model": {
            "name": plan.model.name,
            "parameters": model.parameters(),
            "hidden": model.hidden,
            "layers": model.layers,
            "heads": model.heads,
            "kv_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "ffn": model.ffn,
            "vocab": model.vocab,
            "context": model.context,
            "tied": model.tied,
            "rope": {"theta": model.rope.theta, "scaling": rope_scaling(model.rope.scaling)},
            "norm_eps": human::as_written(model.norm_eps),
            "initializer_range": plan.model.remarks.initializer_range,
            "from_directory": plan.model.weights.is_some(),
        },
        "data": plan.feed.json(&plan.data),
        "tokenizer": plan.tokenizer.as_ref().map(Tokenizer::name),
        "ranks": plan.ranks.world,
        "transport": plan.ranks.asked(),
        "ranks_per_node": plan.asked.ranks_per_node,
        "emulate_link": plan.asked.emulate_link,
        "share_gpus": plan.asked.share_gpus,
        "tuning": tuning::named(plan.asked.tuning.as_ref()).map(|path| path.display().to_string()),
        "rendezvous_timeout": plan.asked.rendezvous_timeout,
        "call_timeout": plan.asked.call_timeout,
        "threads": plan.ranks.threads,
        "device": plan.device.name(),
        "attention": plan.attention(),
        "offload": plan.offload(),
        "cuda_graphs": plan.cuda_graphs,
        "stage": plan.zero.stage.level(),
        "dtype": plan.dtype.name(),
        "matmul_precision": plan.batch.products(plan.dtype, &plan.device),
        "steps": plan.steps,
        "micro_batch": plan.batch.rows,
        "accumulate": plan.zero.accumulate,
        "seq": plan.batch.length,
        "flops_per_token": model.flops_per_token(plan.batch.length),
        "lr": plan.rate.peak,
        "min_lr": plan.rate.floor,
        "warmup": plan.rate.warmup,
        "schedule": plan.rate.shape.name(),
        "weight_decay": human::as_written(plan.zero.adamw.weight_decay),
        "beta1": human::as_written(plan.zero.adamw.beta1),
        "beta2": human::as_written(plan.zero.adamw.beta2),
        "eps": human::as_written(plan.zero.adamw.eps),
        "clip": plan.zero.clip.map(human::as_written),
        "seed": plan.seed,
        "order": plan.order.name(),
        "recompute": recompute(plan),
        "prefetch": plan.zero.prefetch,
        "progress": plan.progress.name(),
        "bucket_bytes": plan.zero.bucket_bytes,
        "eval_every": plan.eval_every,
        "eval_tokens": plan.eval_tokens,
        "val_fraction": plan.val_fraction,
        "sample": plan.sample,
        "save": plan.save.as_ref().map(|path| path.display().to_string()),
        "machine": Machine::probe().json(),
        "versions": versions(),
    })
}
