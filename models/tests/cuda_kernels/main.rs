//! Every CUDA kernel against a naive definition, without a GPU: the kernel sources run on the processor, through the
//! test-only implementation of their device header in `collectives/src/device/emulation`.
//!
//! Each case of `models::cuda::check` runs in ascending, descending and shuffled order of blocks, warps and lanes, and
//! must give the same bits: a missing barrier or a sum in no fixed order shows. The emulation itself reports accesses out
//! of bounds, races on shared memory and elements written twice. Where there is a GPU, the same cases run on it too, as
//! they do in `caravan bench kernels --check`.

mod emulator;
mod faults;
mod losses;
mod mistakes;
mod speed;

use collectives::bf16;
use collectives::device::cuda::{self, Gpu};
use collectives::device::{Queue, SharedQueue, Urgency};
use emulator::emulator;
use models::cuda::TensorCores;
use models::cuda::check::{Outcome, cases};
use models::{Accounts, Llama, LlamaConfig, Recompute};
use std::sync::OnceLock;

/// The GPU, if there is one.
fn gpu() -> Option<&'static Gpu> {
    static GPU: OnceLock<Option<Gpu>> = OnceLock::new();
    let opened = GPU.get_or_init(|| match Gpu::open(0) {
        Ok(gpu) => Some(gpu),
        Err(error) => {
            harness::skip_all("CUDA kernels on a GPU", &error.to_string());
            None
        }
    });
    opened.as_ref()
}

/// Runs a case of these queues by its name.
fn outcome<Q: Queue + 'static>(name: &str, queues: impl IntoIterator<Item = Q>) -> Outcome {
    let queues: Vec<_> = queues.into_iter().map(SharedQueue::new).collect();
    let case = cases::<Q>().into_iter().find(|case| case.name == name);
    case.unwrap_or_else(|| panic!("no case is called {name}")).run(&queues)
}

/// Whether the GPU has what a case's kernels are made of.
fn suits(name: &str, gpu: &Gpu) -> bool {
    let about = gpu.properties();
    cases::<cuda::Stream>().iter().any(|case| case.name == name && case.suits(about.machine, about.shared))
}

fn run(name: &str) {
    let check = |outcome: Outcome| {
        assert!(outcome.wrong.is_empty(), "{name}:\n{}", outcome.wrong.join("\n"));
        assert!(outcome.comparisons > 1, "{name} compares something");
    };
    if let Some(emulator) = emulator() {
        check(outcome(name, [0, 1, 2].map(|seed| emulator.queue(seed))));
    }
    if let Some(gpu) = gpu().filter(|gpu| suits(name, gpu)) {
        check(outcome(name, [0, 1].map(|_| cuda::Stream::new(gpu, Urgency::Normal).unwrap())));
    }
}

macro_rules! tests {
    ($($name:ident)*) => {
        $(#[test] fn $name() { run(stringify!($name)); })*

        #[test]
        fn every_case_is_a_test() {
            let tests = [$(stringify!($name)),*];
            for case in cases::<cuda::Stream>() {
                assert!(tests.contains(&case.name), "{} is run by no test", case.name);
            }
        }
    };
}

tests! {
    a_bf16_llama_with_tensor_core_attention
    an_f16_llama_with_tensor_core_attention
    an_f32_llama_with_tied_embeddings
    heads_of_64_on_tensor_cores
    heads_of_128_on_tensor_cores
    heads_of_64_on_warpgroups
    heads_of_128_on_warpgroups
    plain_attention_for_f32_and_other_widths
    large_scores_neither_overflow_nor_vanish
    large_scores_on_warpgroups
    a_bf16_llama_with_warpgroup_attention
    memory_at_odd_addresses_goes_through_the_plain_kernel
    reductions_have_the_bits_of_the_processor
    adamw_has_the_bits_of_the_processor
    sums_of_squares_have_the_bits_of_the_processor
    casts_round_once
    what_is_not_finite_is_found_wherever_it_is
    norms
    a_residual_is_added_before_the_norm
    rotary_embeddings
    swiglu_and_its_backward
    embeddings
    cross_entropies
    a_target_outside_the_vocabulary_gives_nan
    products_of_every_orientation
    products_of_high_precision
}

#[test]
fn a_head_that_is_too_wide_is_refused() {
    let Some(emulator) = emulator() else { return };
    let config = LlamaConfig { head_dim: 258, ..LlamaConfig::preset("nano").unwrap() };
    let (by, accounts) = (TensorCores::default(), Accounts::default());
    let refused =
        Llama::<bf16, _>::on_device(by, &config, 1, 4, Recompute::None, emulator.queue(0), &accounts);
    let text = refused.err().unwrap().to_string();
    assert!(text.contains("258") && text.contains("at most 256"), "{text}");
}
