//! Times of each kernel on the shapes of a model, and what it moved or computed in that time.

mod kernels;
mod products;
mod timing;

use crate::config::LlamaConfig;
use collectives::device::{Machine, Queue, SharedQueue, Streams};
use collectives::{Error, Result};
use timing::Bench;

/// How large the data are, and how often they are timed.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// Sequences of a micro-batch.
    pub rows: usize,
    /// Tokens of a sequence.
    pub length: usize,
    /// Elements that the optimizer's kernels work on; a multiple of 8192.
    pub elements: usize,
    /// Batches of which the median counts, each of at least `seconds`.
    pub batches: usize,
    /// See `batches`.
    pub seconds: f64,
    /// Bytes of shared memory that a block may have.
    pub shared: usize,
}

/// What bounds a kernel at best.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Work {
    /// Bytes that it must read and write.
    Moved(usize),
    /// Floating-point operations that it must do.
    Computed(f64),
}

/// One kernel's time.
#[derive(Clone, Debug)]
pub struct Row {
    /// The group by which it can be asked for: `copy`, `norm`, `rope`, `swiglu`, `embedding`, `attention`,
    /// `cross_entropy`, `optimizer`, `reduce`, `product`, `attention_wgmma`.
    pub group: &'static str,
    /// What was timed.
    pub name: String,
    /// Seconds of one call.
    pub seconds: f64,
    /// What bounds it.
    pub work: Work,
    /// In how many ways the device's library would compute it, and seconds of the fastest: of products, whose first way is
    /// taken.
    pub best: Option<(usize, f64)>,
}

/// What could not be timed.
#[derive(Clone, Debug)]
pub struct Missing {
    /// As in [`Row`].
    pub group: &'static str,
    /// What was to be timed; the group's name where it has not come to that.
    pub name: String,
    /// What the device said.
    pub why: Error,
}

/// A kernel's time, or what is in its way.
pub type Timed = std::result::Result<Row, Missing>;

/// What is shown, as soon as it is known.
#[derive(Clone, Debug)]
pub enum Shown<'a> {
    /// A kernel is about to be timed: its group and its name. Should it never end, that is known. What is shown next is of it.
    Begins(&'static str, &'a str),
    /// What came of it, or of a group whose kernels could not even begin.
    Ended(Timed),
}

/// The groups of [`Row`], in their order.
pub const GROUPS: [&str; 11] = [
    "copy",
    "norm",
    "rope",
    "swiglu",
    "embedding",
    "attention",
    "cross_entropy",
    "optimizer",
    "reduce",
    "product",
    ATTENTION_WGMMA,
];

/// Attention by products of warpgroups; at the end, as not every GPU has them.
const ATTENTION_WGMMA: &str = "attention_wgmma";

/// The one architecture that a group's kernels are for, if others lack what they use.
pub fn only(group: &str) -> Option<Machine> {
    (group == ATTENTION_WGMMA).then_some(Machine::HOPPER)
}

/// Times kernels of a model, for micro-batches of so many tokens.
type Measure<Q> = fn(&mut Bench<'_, Q>, &LlamaConfig, usize) -> Result<()>;

/// Times the kernels of `config` in bf16, as far as their group is `wanted`, and shows each as it begins and once it is there. What
/// cannot be timed is shown as missing, and the rest is timed all the same.
///
/// # Errors
/// The device takes no more work.
pub fn measure<Q: Streams>(
    queue: &SharedQueue<Q>,
    config: &LlamaConfig,
    scale: Scale,
    wanted: &dyn Fn(&str) -> bool,
    show: &mut dyn FnMut(Shown<'_>),
) -> Result<()> {
    let modules = kernels::modules(config, scale.shared).into_iter().filter(|(group, _)| wanted(group));
    // Side by side. What fails here fails again where it is timed, and is missing there.
    let _ = queue.clone().prepare(&modules.map(|(_, module)| module).collect::<Vec<_>>());
    let mut bench = Bench::new(queue, scale, wanted, show)?;
    let tokens = scale.rows * scale.length;
    let all: [(&[&str], Measure<Q>); 9] = [
        (&["copy"], kernels::copy),
        (&["norm"], kernels::norms),
        (&["rope", "swiglu"], kernels::elementwise),
        (&["embedding"], kernels::embeddings),
        (&["attention"], kernels::attention),
        (&["cross_entropy"], kernels::cross_entropy),
        (&["optimizer", "reduce"], kernels::optimizer),
        (&["product"], products::products),
        (&[ATTENTION_WGMMA], kernels::attention_wgmma),
    ];
    for (groups, measure) in all {
        let Some(group) = groups.iter().find(|group| wanted(group)) else { continue };
        if let Err(why) = measure(&mut bench, config, tokens) {
            // What a device said last that takes no more work is shown already.
            queue.clone().synchronize()?;
            bench.miss(group, (*group).to_owned(), why)?;
        }
    }
    Ok(())
}
