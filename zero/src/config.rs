//! What a run asks of this crate.

use crate::optimizer::AdamW;
use crate::scaling::Scaling;
use crate::stage::Stage;

/// How to shard, reduce, accumulate and update.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// What the ranks divide among themselves.
    pub stage: Stage,
    /// Most bytes of parameters in one bucket; a larger tensor is a bucket of its own.
    pub bucket_bytes: usize,
    /// Gather the next unit while this one computes.
    pub prefetch: bool,
    /// Micro-batches of a rank in one optimizer step, at least 1.
    pub accumulate: usize,
    /// Add micro-batches in the order in which ranks are: with as many micro-batches of all ranks together, the bits are then
    /// the same for every power of two of ranks. Takes memory for log2 of `accumulate` sums, rounded down, in place of one.
    pub reproducible: bool,
    /// How the loss is scaled, if it is.
    pub scaling: Option<Scaling>,
    /// The optimizer.
    pub adamw: AdamW,
    /// Largest global gradient norm; longer gradients are scaled down to it.
    pub clip: Option<f32>,
    /// Where everything lies: on the host for [`Trainer::new`](crate::Trainer::new), on a device for
    /// [`Trainer::on_device`](crate::Trainer::on_device).
    pub placement: Placement,
}

impl Config {
    /// Whether its numbers are ones to train with: the first that is not, and what would be.
    pub(crate) fn check(&self) -> Result<(), String> {
        let AdamW { beta1, beta2, eps, weight_decay } = self.adamw;
        let below_1 = |x: f32| (0.0..1.0).contains(&x);
        let finite = |x: f32, fits: bool| x.is_finite() && fits;
        let clip = self.clip.unwrap_or(1.0);
        let rules = [
            ("beta1", beta1, below_1(beta1), "from 0 to below 1"),
            ("beta2", beta2, below_1(beta2), "from 0 to below 1"),
            ("eps", eps, finite(eps, eps > 0.0), "above 0"),
            ("weight_decay", weight_decay, finite(weight_decay, weight_decay >= 0.0), "at least 0"),
            ("clip", clip, finite(clip, clip > 0.0), "above 0, or None"),
        ];
        if self.accumulate == 0 {
            return Err("0 micro-batches in a step: at least 1 is needed".to_owned());
        }
        match rules.into_iter().find(|(_, _, fits, _)| !fits) {
            None => self.scaling.map_or(Ok(()), |scaling| scaling.check()),
            Some((name, value, _, range)) => Err(format!("{name} is {value:?}: it has to be {range}")),
        }
    }
}

/// Where a rank keeps and computes what it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Placement {
    /// On the host.
    #[default]
    Host,
    /// On a device.
    Device,
    /// On a device, but the optimizer's state in memory of the host, which updates it.
    Offloaded,
}

impl Placement {
    /// Whether parameters, gradients and the model are on a device.
    pub fn on_device(self) -> bool {
        self != Placement::Host
    }

    /// Which of two is meant of memory of the host that is used in a step: beside a device it is counted apart from the
    /// `workspace`, which is the device's, as what the `host` has.
    pub fn of_host<C>(self, workspace: C, host: C) -> C {
        if self.on_device() { host } else { workspace }
    }

    /// Whether the optimizer's state is on a device.
    pub fn optimizer_on_device(self) -> bool {
        self == Placement::Device
    }
}

impl Default for Config {
    fn default() -> Self {
        Config {
            stage: Stage::ALL[3],
            bucket_bytes: 64 << 20,
            prefetch: true,
            accumulate: 1,
            reproducible: false,
            scaling: None,
            adamw: AdamW::default(),
            clip: Some(1.0),
            placement: Placement::Host,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Ledger, Memory};

    #[test]
    fn memory_of_the_host_is_workspace_but_beside_a_device() {
        for (placement, workspace, host) in
            [(Placement::Host, 5, 0), (Placement::Device, 0, 5), (Placement::Offloaded, 0, 5)]
        {
            let mut memory = Memory::default();
            *placement.of_host(&mut memory.workspace, &mut memory.host) += 5;
            assert_eq!((memory.workspace, memory.host), (workspace, host), "{placement:?}");
            // What the engine works in, too.
            let ledger = Ledger { placement, ..Ledger::default() };
            let _five = collectives::Buffer::<u8>::zeroed(5).booked(&ledger.engine);
            assert_eq!(ledger.held(), memory, "{placement:?}");
        }
    }
}
