//! What is read of several keys together: types, the optimizer, and where states lie.

use super::document::{Document, Said, plain, shown};
use super::keys::Told;
use super::schedule;
use serde_json::Value;

/// A flag that the file stands for.
#[derive(Clone, Debug, PartialEq)]
pub struct Word {
    /// The flag.
    pub flag: &'static str,
    /// Its value.
    pub value: String,
    /// The key that says so, or that does not.
    pub key: String,
    /// The value that the key has in the file, empty of several keys. None: it is DeepSpeed's own for a key that is not there,
    /// and a flag wins over it.
    pub said: Option<String>,
    /// What is to be known of it.
    pub remark: &'static str,
    /// Whether the flag was typed, too.
    pub typed: bool,
}

impl Word {
    /// What a key says.
    pub fn new(flag: &'static str, value: String, key: &str, said: &Value) -> Self {
        Word { flag, value, key: key.to_owned(), said: Some(shown(said)), remark: "", typed: false }
    }

    /// What DeepSpeed takes where a key says nothing.
    pub fn unsaid(flag: &'static str, value: &str, key: &str) -> Self {
        Word { flag, value: value.to_owned(), key: key.to_owned(), said: None, remark: "", typed: false }
    }
}

/// What the command line says that a file is read beside: of flags their values, and whether they were typed.
#[derive(Clone, Debug)]
pub struct Beside {
    /// Whether ranks compute on GPUs.
    pub cuda: bool,
    /// As --dtype has it.
    pub dtype: (String, bool),
    /// As --stage.
    pub stage: (String, bool),
    /// As --lr.
    pub lr: (String, bool),
    /// As --weight-decay.
    pub decay: (String, bool),
}

/// Reads what the table leaves to be read together.
///
/// # Errors
/// The first value that is not of its type, or not supported.
pub fn read(document: &Document, beside: &Beside, told: &mut Told) -> Result<(), String> {
    stage(document, told)?;
    dtype(document, &beside.dtype, told)?;
    let dtype = outcome(told, "--dtype", &beside.dtype);
    scale(document, dtype == "f16", told)?;
    communication(document, &dtype, told)?;
    buckets(document, &dtype, beside, told)?;
    offload(document, beside, told)?;
    optimizer(document, beside, told)?;
    schedule::read(document, beside, told)?;
    // Which a script would bring with it.
    let brought = ["optimizer", "scheduler"].into_iter().filter(|block| !document.has(block));
    told.left.extend(brought.map(str::to_owned));
    if !document.has("gradient_clipping") {
        told.words.push(Word::unsaid("--clip", "1", "gradient_clipping"));
    }
    Ok(())
}

/// What a flag comes to: what the file says of it goes before what was typed, which has to be the same, that before DeepSpeed's
/// default, and that before the flag's own.
pub fn outcome(told: &Told, flag: &str, (value, typed): &(String, bool)) -> String {
    let word = told.words.iter().find(|word| word.flag == flag);
    match word.filter(|word| word.said.is_some() || !typed) {
        Some(word) => word.value.clone(),
        None => value.clone(),
    }
}

/// What a key says as a flag's value, or what DeepSpeed takes in its place.
pub fn push(
    document: &Document,
    told: &mut Told,
    (flag, key): (&'static str, &str),
    said: Said<String>,
    unsaid: Option<&str>,
) {
    match (said, document.get(key), unsaid) {
        (Said::Value(value), Some(there), _) => told.words.push(Word::new(flag, value, key, there)),
        (Said::Absent, _, Some(unsaid)) => told.words.push(Word::unsaid(flag, unsaid, key)),
        _ => {}
    }
}

fn stage(document: &Document, told: &mut Told) -> Result<(), String> {
    let key = "zero_optimization";
    match document.get(key) {
        // As it was once written.
        Some(value @ Value::Bool(on)) => {
            told.words.push(Word::new("--stage", u8::from(*on).to_string(), key, value));
        }
        _ => {
            let key = format!("{key}.stage");
            if let Said::Value(stage) = document.number(&key)?
                && stage > 3.0
            {
                return Err(format!("{key} {}: there are the stages 0, 1, 2 and 3", plain(stage)));
            }
            // What it says the table has.
            if document.whole(&key)? == Said::Absent {
                told.words.push(Word::unsaid("--stage", "0", &key));
            }
        }
    }
    Ok(())
}

fn dtype(document: &Document, (flag, typed): &(String, bool), told: &mut Told) -> Result<(), String> {
    if document.has("bf16") && document.has("bfloat16") {
        return Err("bf16 and bfloat16 are the same: take bf16 alone".to_owned());
    }
    let half = "fp16.enabled";
    let bf16 = if document.has("bfloat16") { "bfloat16.enabled" } else { "bf16.enabled" };
    let left = |off, name| match (flag == name, typed) {
        (true, true) => Err(format!(
            "{off} false, and --dtype {name} says something else: take another --dtype, or {off} \"auto\""
        )),
        (true, false) => Ok((off, Some("f32"))),
        (false, _) => Ok(("", None)),
    };
    let (key, dtype) = match (document.switch(half)?, document.switch(bf16)?) {
        (Said::Value(true), Said::Value(true)) => {
            return Err(format!("{half} and {bf16} are both true: take one of them"));
        }
        (Said::Value(true), _) => (half, Some("f16")),
        (_, Said::Value(true)) => (bf16, Some("bf16")),
        // The other one is left to the flag, and this one is not.
        (Said::Auto, Said::Value(false)) => left(bf16, "bf16")?,
        (Said::Value(false), Said::Auto) => left(half, "f16")?,
        (Said::Auto, _) | (_, Said::Auto) => ("", None),
        (Said::Value(false), _) => (half, Some("f32")),
        (_, Said::Value(false)) => (bf16, Some("f32")),
        _ => ("fp16 and bf16", Some("f32")),
    };
    // The one that is not on.
    for other in [half, bf16].into_iter().filter(|other| *other != key) {
        if document.switch(other)?.value().is_some() {
            told.same.push(other.to_owned());
        }
    }
    if let Some(dtype) = dtype {
        match document.get(key) {
            Some(value) => told.words.push(Word::new("--dtype", dtype.to_owned(), key, value)),
            None => told.words.push(Word::unsaid("--dtype", dtype, key)),
        }
    }
    Ok(())
}

/// By what losses are multiplied.
fn scale(document: &Document, half: bool, told: &mut Told) -> Result<(), String> {
    let key = "fp16.loss_scale";
    let [power, window, hysteresis, least, consecutive] = [
        "fp16.initial_scale_power",
        "fp16.loss_scale_window",
        "fp16.hysteresis",
        "fp16.min_loss_scale",
        "fp16.consecutive_hysteresis",
    ];
    // What the flags are left to say is told already.
    let there = |key: &&str| document.get(key).is_some_and(|value| value != "auto");
    let set: Vec<&str> = [power, window, hysteresis, least, consecutive].into_iter().filter(there).collect();
    let fixed = document.number(key)?;
    if let Said::Value(fixed) = fixed
        && fixed < 0.0
    {
        return Err(format!("{key} {fixed}: it must be above 0, or 0 for one that changes"));
    }
    // Settings that nothing is made of may be what they like, as for DeepSpeed.
    if !half {
        let all = [key].into_iter().filter(there).chain(set);
        all.for_each(|key| told.ignore(key, "losses are scaled in f16 only"));
        return Ok(());
    }
    if let Said::Value(fixed) = fixed
        && fixed > 0.0
    {
        set.iter().for_each(|key| told.ignore(key, "fp16.loss_scale is fixed"));
        let remark = "two overflows in a row end the run, where DeepSpeed goes on skipping, and it multiplies the mean over all \
                      ranks, not each rank's own loss";
        let value = document.get(key).map(|said| Word::new("--loss-scale", plain(fixed), key, said));
        told.words.extend(value.map(|word| Word { remark, ..word }));
        return Ok(());
    }
    let remark = "it multiplies the mean over all ranks, not each rank's own loss";
    if set.is_empty() {
        let there = document.get(key).filter(|_| matches!(fixed, Said::Value(_)));
        let word = there.map(|said| Word::new("--loss-scale", "dynamic".to_owned(), key, said));
        told.words.extend(word.map(|word| Word { remark, ..word }));
        return Ok(());
    }
    let most = u32::MAX as usize;
    let initial = document.whole(power)?.value().unwrap_or(16);
    if initial > 127 {
        return Err(format!("{power} {initial}: f32 has powers of two up to 127"));
    }
    let value = format!(
        "initial={},window={},hysteresis={},min={},consecutive={}",
        2f64.powi(initial as i32),
        document.count_to(window, most)?.value().unwrap_or(1000),
        document.count_to(hysteresis, most)?.value().unwrap_or(2),
        document.count(least)?.value().unwrap_or(1),
        if document.switch(consecutive)?.value().unwrap_or(false) { "on" } else { "off" },
    );
    let fixed = document.get(key).filter(|_| fixed != Said::Auto).map(|_| key);
    let key = fixed.into_iter().chain(set).collect::<Vec<_>>().join(", ");
    let said = Some(String::new());
    told.words.push(Word { flag: "--loss-scale", value, key, said, remark, typed: false });
    Ok(())
}

fn communication(document: &Document, dtype: &str, told: &mut Told) -> Result<(), String> {
    let key = "communication_data_type";
    let Some(named) = document.text(key)?.value() else {
        if document.get(key).is_some_and(serde_json::Value::is_null) {
            told.same.push(key.to_owned());
        }
        return Ok(());
    };
    let ours = match dtype {
        "f16" => "fp16",
        "f32" => "fp32",
        dtype => dtype,
    };
    if !named.eq_ignore_ascii_case(ours) {
        return Err(format!(
            "{key} \"{named}\" is not supported: what is sent has the type of --dtype {dtype}: take \"{ours}\" or null"
        ));
    }
    told.same.push(key.to_owned());
    Ok(())
}

fn buckets(document: &Document, dtype: &str, beside: &Beside, told: &mut Told) -> Result<(), String> {
    let key = "zero_optimization.reduce_bucket_size";
    let elements = document.count(key)?;
    let size = if dtype == "f32" { 4 } else { 2 };
    let bytes = elements.map(|elements| elements.saturating_mul(size).to_string());
    push(document, told, ("--bucket-size", key), bytes, None);
    let stage = outcome(told, "--stage", &beside.stage);
    let names = ["stage3_prefetch_bucket_size", "prefetch_bucket_size"];
    let names = names.map(|name| format!("zero_optimization.{name}"));
    if let [one, other] = &names
        && document.has(one)
        && document.has(other)
    {
        return Err(format!("{one} and {other} are the same: take {one} alone"));
    }
    for key in &names {
        match document.whole(key)? {
            Said::Absent | Said::Auto => {}
            Said::Value(_) if stage != "3" => told.ignore(key, "nothing is gathered before stage 3"),
            Said::Value(0) => {
                push(document, told, ("--prefetch", key), Said::Value("off".to_owned()), None);
            }
            Said::Value(_) => {
                told.ignore(key, "one unit is gathered ahead, whatever its size (0 turns that off)")
            }
        }
    }
    Ok(())
}

/// The devices that a key may name.
fn place(document: &Document, block: &str, old: &str) -> Result<Option<(String, String)>, String> {
    let (block, old) = (format!("zero_optimization.{block}"), format!("zero_optimization.{old}"));
    let switch = document.switch(&old)?;
    if matches!(switch, Said::Value(_)) && document.has(&block) {
        return Err(format!("{old} is an older form of {block}: take {block} alone"));
    }
    if let Said::Value(true) = switch {
        return Ok(Some((old, "cpu".to_owned())));
    }
    let key = format!("{block}.device");
    match document.text(&key)? {
        Said::Value(device) if ["none", "cpu", "nvme"].contains(&&*device) => Ok(Some((key, device))),
        Said::Value(device) => Err(format!("{key} \"{device}\": \"none\" and \"cpu\" are supported")),
        Said::Absent | Said::Auto => Ok(None),
    }
}

fn offload(document: &Document, beside: &Beside, told: &mut Told) -> Result<(), String> {
    for (block, old) in [("offload_optimizer", "cpu_offload"), ("offload_param", "cpu_offload_param")] {
        let Some((key, device)) = place(document, block, old)? else { continue };
        let optimizer = block == "offload_optimizer";
        match (device.as_str(), beside.cuda) {
            ("nvme", _) => {
                return Err(format!("{key} \"nvme\" is not supported: take \"cpu\", the memory of the host"));
            }
            ("none", true) if optimizer => {
                push(document, told, ("--offload", &key), Said::Value("none".to_owned()), None);
            }
            ("none", _) => told.same.push(key),
            (_, true) if optimizer => {
                push(document, told, ("--offload", &key), Said::Value("optimizer".to_owned()), None);
            }
            (_, true) => {
                return Err(format!(
                    "{key} \"cpu\" is not supported with --device cuda: parameters stay on GPUs: take \"none\", and stage 3 \
                     over more ranks or --recompute full for less memory of each"
                ));
            }
            (_, false) => told.ignore(&key, "with --device cpu all is in memory of the host anyway"),
        }
    }
    for old in ["cpu_offload", "cpu_offload_param"] {
        let key = format!("zero_optimization.{old}");
        if document.switch(&key)? == Said::Value(false) {
            told.same.push(key);
        }
    }
    Ok(())
}

fn optimizer(document: &Document, beside: &Beside, told: &mut Told) -> Result<(), String> {
    let Some(kind) = optimizer_type(document)? else { return Ok(()) };
    told.same.push("optimizer.type".to_owned());
    let param = |name: &str| format!("optimizer.params.{name}");
    let torch = document.switch(&param("torch_adam"))?;
    // An Adam whose weights decay by the gradient.
    let mut other = None;
    for name in ["adam_w_mode", "adamw_mode"] {
        let key = param(name);
        match document.switch(&key)? {
            Said::Absent | Said::Auto => {}
            Said::Value(false) if kind == "adam" => other = Some(key),
            Said::Value(_) => told.same.push(key),
        }
    }
    if torch != Said::Absent {
        told.ignore(&param("torch_adam"), "there is one AdamW");
    }
    let betas = document.pair(&param("betas"))?;
    for (index, (flag, unsaid)) in [("--beta1", "0.9"), ("--beta2", "0.999")].into_iter().enumerate() {
        let one = betas.clone().map(|betas| plain(betas[index]));
        push(document, told, (flag, &param("betas")), one, Some(unsaid));
    }
    if !document.has(&param("eps")) {
        told.words.push(Word::unsaid("--eps", "1e-8", &param("eps")));
    }
    // PyTorch's AdamW has a default of its own, and its Adam DeepSpeed's.
    let usual = if torch == Said::Value(true) && other.is_none() { "0.01" } else { "0" };
    let (key, before) = (param("weight_decay"), told.words.len());
    let decay = document.number(&key)?;
    let flag = decay.clone().value().is_none();
    push(document, told, ("--weight-decay", &key), decay.map(plain), Some(usual));
    let none = |value: &str| value.parse() == Ok(0.0);
    if let Some(word) = told.words.get_mut(before).filter(|word| !none(&word.value)) {
        word.remark = "of matrices and embeddings: norms have none";
    }
    let Some(other) = other else { return Ok(()) };
    if !none(&outcome(told, "--weight-decay", &beside.decay)) {
        let without = if flag { "--weight-decay 0" } else { "weight_decay 0" };
        return Err(format!(
            "{other} false is not supported: weights decay beside the gradient, as AdamW's: take true, or {without}, with \
             which both are the same"
        ));
    }
    told.same.push(other);
    Ok(())
}

/// Which optimizer, if the file says.
///
/// # Errors
/// One that there is not.
pub fn optimizer_type(document: &Document) -> Result<Option<String>, String> {
    let key = "optimizer.type";
    let kind = match document.text(key)? {
        Said::Value(kind) => kind,
        Said::Auto => "auto".to_owned(),
        Said::Absent if document.is_block("optimizer") => {
            return Err(format!("{key} is not there: take \"AdamW\""));
        }
        // What is no block is told as such.
        Said::Absent => return Ok(None),
    };
    match kind.to_lowercase().as_str() {
        known @ ("adam" | "adamw") => Ok(Some(known.to_owned())),
        _ => Err(format!("{key} \"{kind}\" is not supported: take \"AdamW\"")),
    }
}
