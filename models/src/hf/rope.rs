//! The rope of a config.json, in whichever spelling; what versions of transformers read differently is refused.

use super::fields::Fields;
use crate::config::{Rope, RopeScaling};
use crate::error::{Error, Result};
use serde_json::{Map, Value, json};

/// Both spellings: `rope_theta` with `rope_scaling` (transformers 4) and `rope_parameters` (5).
pub(super) fn parse_rope(fields: &Fields<'_>, context: usize) -> Result<Rope> {
    check_rotated(fields)?;
    let theta = fields.number("rope_theta")?;
    let object = |key, inside| match fields.object(key)?.filter(|map| !map.is_empty()) {
        Some(map) => parse_rope_object(fields, inside, map, context).map(Some),
        None => Ok(None),
    };
    match (object("rope_scaling", "rope_scaling.")?, object("rope_parameters", "rope_parameters.")?) {
        (Some(old), Some(new)) if old != new => {
            let problem = "rope_scaling and rope_parameters disagree: one of them must go";
            Err(Error::format(fields.path, problem))
        }
        (Some(old), None) if theta.is_none() && old.theta != DEFAULT_THETA => {
            let wanted = "transformers 4 takes it only from beside rope_scaling, so put it there";
            Err(fields.wrong("rope_scaling.rope_theta", &json!(old.theta), wanted))
        }
        (old, new) => Ok(new.or(old).unwrap_or(Rope::plain(theta.unwrap_or(DEFAULT_THETA)))),
    }
}

/// Refuses to rotate a part of each head, which some say beside the rope's object and some in it.
fn check_rotated(fields: &Fields<'_>) -> Result<()> {
    let key = "partial_rotary_factor";
    match fields.number(key)? {
        None | Some(1.0) => Ok(()),
        Some(part) => Err(fields.wrong(key, &json!(part), "only 1, the whole head, is supported")),
    }
}

const DEFAULT_THETA: f64 = 10_000.0;
/// What only positions that are scaled have.
const SCALED: [&str; 3] = ["factor", "low_freq_factor", "high_freq_factor"];
pub(super) const ORIGINAL: &str = "original_max_position_embeddings";

fn parse_rope_object(
    outer: &Fields<'_>,
    inside: &str,
    map: &Map<String, Value>,
    context: usize,
) -> Result<Rope> {
    let fields = Fields { path: outer.path, inside, map };
    check_rotated(&fields)?;
    if let Some((key, value)) = map.iter().find(|(_, value)| value.is_object()) {
        return Err(fields.wrong(key, value, "one rope for all layers is supported"));
    }
    let required = |key: &str| fields.number(key)?.ok_or_else(|| fields.missing(key));
    let key = if fields.get("rope_type").is_some() { "rope_type" } else { "type" };
    let kind = fields.text(key)?;
    if let (Some(kind), Some(older)) = (kind, fields.text("type")?)
        && kind != older
    {
        // transformers 5 takes rope_type, and most of 4 the other.
        return Err(fields.wrong(
            "type",
            &json!(older),
            &format!("rope_type is {kind}: one of them must go"),
        ));
    }
    if kind.is_none()
        && let Some((scaled, value)) = SCALED.iter().find_map(|key| Some((key, fields.get(key)?)))
    {
        // Some versions of transformers refuse it, and some scale nothing.
        return Err(fields.wrong(scaled, value, "rope_type is missing: linear and llama3 have this"));
    }
    let scaling = match kind {
        None | Some("default") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear { factor: required("factor")? },
        Some("llama3") => RopeScaling::Llama3 {
            factor: required("factor")?,
            low_freq_factor: required("low_freq_factor")?,
            high_freq_factor: required("high_freq_factor")?,
            original_context: fields.or_beside(outer, ORIGINAL, Fields::size)?.unwrap_or(context),
        },
        Some(other) => {
            let wanted = "only default, linear and llama3 are supported";
            return Err(fields.wrong(key, &json!(other), wanted));
        }
    };
    let theta = fields.or_beside(outer, "rope_theta", Fields::number)?.unwrap_or(DEFAULT_THETA);
    Ok(Rope { theta, scaling })
}

/// `rope_scaling` of a config.json, as transformers 4 and 5 both read it: of `linear`, up to 4.42, these two fields alone.
pub fn rope_scaling(scaling: RopeScaling) -> Value {
    match scaling {
        RopeScaling::None => Value::Null,
        RopeScaling::Linear { factor } => json!({"type": "linear", "factor": factor}),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original_context,
        }),
    }
}
