//! What the files of a model directory are called, beside its configuration.

/// Files beside weights and config.json that a model directory may have, as transformers writes them; a directory with
/// any other file is not ours to replace.
pub const COMPANIONS: [&str; 9] = [
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
];
/// The directory beside them in which transformers puts the chat templates of a model that has several, but for the first.
pub const TEMPLATES: &str = "additional_chat_templates";

/// Whether a file of this name belongs beside weights and config.json.
pub fn is_companion(name: &str) -> bool {
    COMPANIONS.contains(&name) || is_template(name)
}

/// Whether it is the name of a chat template in [`TEMPLATES`].
pub fn is_template(name: &str) -> bool {
    let file = name.strip_prefix(TEMPLATES).and_then(|rest| rest.strip_prefix('/'));
    let template = file.and_then(|file| file.strip_suffix(".jinja"));
    template.is_some_and(|template| !template.is_empty() && !template.contains('/'))
}

/// Whether it is the name of one of several files of weights.
pub fn is_shard(name: &str) -> bool {
    let numbers = name.strip_prefix("model-").and_then(|rest| rest.strip_suffix(".safetensors"));
    let number = |digits: &str| digits.len() == 5 && digits.bytes().all(|digit| digit.is_ascii_digit());
    numbers.and_then(|rest| rest.split_once("-of-")).is_some_and(|(i, count)| number(i) && number(count))
}
