//! Every kernel against its definition on the host, on any queue: the emulation in tests, and a GPU where there is one.
//!
//! Data lie in memory of the host, where definitions read them, and are copied to the device's for each run; in a case that
//! has page-locked memory the device reads that in place.
//!
//! A case runs on several queues of one device and must give the same bits on each: on the emulation these run blocks,
//! warps and lanes in different orders.

mod attention;
mod bed;
mod copies;
mod elementwise;
mod head;
mod model;
mod optimizer;
mod products;
mod reduction;

use super::sources;
use bed::Bed;
pub use bed::Outcome;
use collectives::DType::{self, Bf16, F16, F32};
use collectives::device::{Machine, Module, Queue, SharedQueue, Source};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// One case.
pub struct Case<Q: Queue> {
    /// What it is about.
    pub name: &'static str,
    /// The kernels that it launches; none for a product.
    pub sources: &'static [&'static str],
    /// Bytes of shared memory of a block that it takes, where not every GPU has as much.
    shared: usize,
    run: fn(&Bed<Q>),
}

macro_rules! cases {
    ($($file:ident::$name:ident $([$shared:expr])?: $($source:literal),*;)*) => {
        vec![$(Case {
            name: stringify!($name),
            sources: &[$($source),*],
            shared: [$($shared,)? 0][0],
            run: $file::$name::<Q>,
        }),*]
    };
}

/// All cases: those of single kernels, then whole models, which launch all of them; at the end those that not every GPU
/// can run. So what a failure leaves untried is least.
pub fn cases<Q: Queue + 'static>() -> Vec<Case<Q>> {
    cases![
        elementwise::norms: "rmsnorm";
        elementwise::a_residual_is_added_before_the_norm: "rmsnorm";
        elementwise::rotary_embeddings: "rope";
        elementwise::swiglu_and_its_backward: "swiglu";
        head::embeddings: "embedding";
        head::cross_entropies: "cross_entropy";
        head::a_target_outside_the_vocabulary_gives_nan: "cross_entropy";
        optimizer::casts_round_once: "cast";
        optimizer::what_is_not_finite_is_found_wherever_it_is: "cast";
        optimizer::adamw_has_the_bits_of_the_processor: "adamw";
        optimizer::sums_of_squares_have_the_bits_of_the_processor: "squares";
        reduction::reductions_have_the_bits_of_the_processor: "reduce";
        products::products_of_every_orientation:;
        products::products_of_high_precision:;
        attention::plain_attention_for_f32_and_other_widths: "attention_plain";
        attention::memory_at_odd_addresses_goes_through_the_plain_kernel: "attention_plain";
        attention::heads_of_64_on_tensor_cores: "attention_forward", "attention_backward";
        attention::heads_of_128_on_tensor_cores[attention::shared_of_128()]: "attention_forward", "attention_backward";
        attention::large_scores_neither_overflow_nor_vanish: "attention_forward";
        model::an_f32_llama_with_tied_embeddings: "rmsnorm", "rope", "swiglu", "embedding", "cross_entropy",
            "attention_plain";
        model::a_bf16_llama_with_tensor_core_attention: "rmsnorm", "rope", "swiglu", "embedding", "cross_entropy",
            "attention_forward", "attention_backward";
        model::an_f16_llama_with_tensor_core_attention: "rmsnorm", "rope", "swiglu", "embedding", "cross_entropy",
            "attention_forward", "attention_backward";
        attention::heads_of_64_on_warpgroups: "attention_forward_wgmma", "attention_backward_wgmma", "attention_backward";
        attention::heads_of_128_on_warpgroups: "attention_forward_wgmma", "attention_backward_wgmma", "attention_backward";
        attention::large_scores_on_warpgroups: "attention_forward_wgmma";
        model::a_bf16_llama_with_warpgroup_attention: "rmsnorm", "rope", "swiglu", "embedding", "cross_entropy",
            "attention_forward_wgmma", "attention_backward_wgmma", "attention_backward";
    ]
}

impl<Q: Queue> Case<Q> {
    /// Whether a GPU of this architecture, with so much shared memory of a block, has what its kernels are made of.
    pub fn suits(&self, machine: Machine, shared: usize) -> bool {
        if self.shared > shared {
            return false;
        }
        let sources = sources::ALL.iter().filter(|source| self.sources.contains(&source.name));
        sources.into_iter().all(|source| source.only.is_none_or(|only| only == machine))
    }

    /// Runs it on queues of one device; two at least show whether it gives the same bits again. Whatever the device refuses
    /// is wrong with this case; whether it takes more work afterwards, [`lost`] says.
    pub fn run(&self, queues: &[SharedQueue<Q>]) -> Outcome {
        let bed = Bed::new(queues.to_vec());
        if let Some(queue) = queues.first() {
            let modules: Vec<Module> =
                modules().into_iter().filter(|m| self.sources.contains(&m.source.name)).collect();
            let prepared = queue.clone().prepare(&modules);
            let failed = prepared.is_err();
            bed.that(!failed, || prepared.map_or_else(|error| error.to_string(), |()| String::new()));
            if failed {
                return bed.outcome();
            }
        }
        // Of what the case takes for granted.
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (self.run)(&bed))) {
            bed.refused(words(&*panic));
        }
        bed.outcome()
    }
}

/// What a panic says.
fn words(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without words").to_owned()
}

/// Why a device takes no more work, if it does not: after some failures of a kernel nothing of a process runs on it any
/// more.
pub fn lost<Q: Queue>(queues: &[SharedQueue<Q>]) -> Option<String> {
    queues.iter().find_map(|queue| queue.clone().synchronize().err()).map(|error| error.to_string())
}

/// Every module that cases run: all sources, each for what it is made for.
pub fn modules() -> Vec<Module> {
    let mut modules = Vec::new();
    let same = |a: &Source, b: &Source| a.name == b.name;
    let tiled = |source| sources::TILED.iter().any(|tiled| same(tiled, source));
    for &source in sources::ALL {
        let heads: &[(DType, usize)] = if same(source, &sources::ATTENTION_PLAIN) {
            &[(F32, 64), (F32, 6), (F32, 128), (Bf16, 16), (F16, 40)]
        } else if tiled(source) {
            &[(Bf16, 64), (Bf16, 128), (F16, 64)]
        } else {
            &[(F32, 0), (Bf16, 0), (F16, 0)]
        };
        modules.extend(heads.iter().map(|&(element, head)| Module::with_head(source, element, head)));
    }
    modules.extend(DType::ALL.map(Module::reduce));
    modules
}
