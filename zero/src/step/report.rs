//! What is told of a step.

/// What one step did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Step {
    /// Mean loss over the tokens of all ranks and micro-batches.
    pub loss: f64,
    /// Euclidean norm of the gradient of that mean, before clipping; not finite where the step was skipped.
    pub grad_norm: f64,
    /// What the loss was scaled by: 1 where it is not.
    pub loss_scale: f64,
    /// Whether the scaled gradient was too large for its type, and nothing was updated.
    pub skipped: bool,
    /// Tokens of all ranks.
    pub tokens: usize,
    /// Bytes that this rank sent.
    pub bytes_sent: u64,
    /// Wall time.
    pub seconds: f64,
    /// Of it, in the model's forward and backward, and in adding up micro-batches. On a device this and the two below are
    /// times of its compute queue between events, from the norm of the step before to this one's, so that the host need not
    /// wait for the end of a step to know them.
    pub compute_seconds: f64,
    /// Of it, in the optimizer.
    pub optimizer_seconds: f64,
    /// Of it, in starting, advancing and awaiting collectives: what overlap did not hide.
    pub exposed_communication_seconds: f64,
}
