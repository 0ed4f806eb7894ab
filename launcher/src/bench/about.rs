//! What the JSON of every run says first, whatever was measured: what wrote it, when, how it was called, and where.

use super::record::now;
use crate::machine::{Machine, versions};
use serde_json::{Value, json};

/// Of a run that began at `started`, over `library` where the transport has one.
pub fn about(started: &str, library: Option<String>) -> Value {
    json!({
        "generator": format!("caravan {}", env!("CARGO_PKG_VERSION")),
        "start_time": started,
        "end_time": now(),
        "args": std::env::args_os().map(|arg| arg.to_string_lossy().into_owned()).collect::<Vec<_>>(),
        "env": environment(),
        "machine": Machine::probe().json(),
        "versions": versions(),
        "transport_library": library,
    })
}

/// Settings of communication libraries in the environment; nothing else of it, for it may hold secrets.
fn environment() -> Vec<String> {
    let prefixes =
        ["UCX_", "OMPI_MCA_btl", "OMPI_MCA_pml", "OMPI_MCA_coll", "MPIR_CVAR_", "NCCL_", "CARAVAN_TUNING"];
    let mut all: Vec<String> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, _)| prefixes.iter().any(|p| name.starts_with(p)))
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    all.sort();
    all
}
