//! Which kernels or cases the words of a command line choose.

use crate::failure::{Failure, Result};

/// What can be chosen: a group of kernels or a case, by all the names that it goes by, the first of which is its own.
pub struct Named {
    pub names: Vec<&'static str>,
    /// The architecture that it is for, where this machine has another: then it cannot be had here.
    pub foreign: Option<String>,
}

/// Whether each of `all` is chosen: of those that `only` names, or of all where that names nothing, those that `without` does
/// not name.
///
/// # Errors
/// A word that names nothing, or words that leave nothing.
pub fn choose(all: &[Named], only: &[String], without: &[String]) -> Result<Vec<bool>> {
    for word in only.iter().chain(without) {
        if !all.iter().any(|named| names(all, word, named)) {
            let known: Vec<&str> = all.iter().map(|named| named.names[0]).collect();
            return Err(Failure::usage(format!("no kernel is called '{word}': {}", known.join(", "))));
        }
    }
    let any = |words: &[String], named: &Named| words.iter().any(|word| names(all, word, named));
    let chosen = |named: &Named| (only.is_empty() || any(only, named)) && !any(without, named);
    if !all.iter().any(chosen) {
        let leaves = format!("--without {} leaves nothing of what is asked for", without.join(" --without "));
        return Err(Failure::usage(format!("{leaves}: give other words, or fewer")));
    }
    let had: Vec<bool> = all.iter().map(|named| chosen(named) && named.foreign.is_none()).collect();
    match all.iter().filter(|named| chosen(named)).find_map(|named| named.foreign.as_ref()) {
        Some(foreign) if !had.contains(&true) => {
            Err(Failure::usage(format!("'{}' names kernels {foreign}", only.join(" "))))
        }
        _ => Ok(had),
    }
}

/// Whether a word names this one: with a whole name where it is somebody's, otherwise with a part of one.
fn names(all: &[Named], word: &str, named: &Named) -> bool {
    let whole = |named: &Named| named.names.contains(&word);
    match all.iter().any(whole) {
        true => whole(named),
        false => named.names.iter().any(|name| name.contains(word)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Named> {
        let named = |names: &[&'static str]| Named { names: names.to_vec(), foreign: None };
        let wgmma = Named { foreign: Some("for another".into()), ..named(&["attention_wgmma"]) };
        vec![named(&["norms", "rmsnorm"]), named(&["a_residual", "rmsnorm"]), named(&["attention"]), wgmma]
    }

    fn chosen(only: &str, without: &str) -> Result<Vec<&'static str>> {
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let all = all();
        let had = choose(&all, &words(only), &words(without))?;
        Ok(all.iter().zip(had).filter(|(_, had)| *had).map(|(named, _)| named.names[0]).collect())
    }

    #[test]
    fn whole_names_choose_one_and_parts_of_names_all_that_have_them() {
        assert_eq!(chosen("", "").unwrap(), ["norms", "a_residual", "attention"]);
        assert_eq!(chosen("norms", "").unwrap(), ["norms"]);
        assert_eq!(chosen("norm", "").unwrap(), ["norms", "a_residual"]);
        assert_eq!(chosen("rmsnorm", "").unwrap(), ["norms", "a_residual"]);
        assert_eq!(chosen("norm attention", "norms").unwrap(), ["a_residual", "attention"]);
        assert_eq!(chosen("", "attention").unwrap(), ["norms", "a_residual"]);
    }

    #[test]
    fn words_that_choose_nothing_are_refused() {
        let text = |only, without| chosen(only, without).unwrap_err().to_string();
        assert!(text("pigeon", "").contains("no kernel is called 'pigeon': norms, a_residual"));
        assert!(text("", "pigeon").contains("'pigeon'"));
        assert!(text("norms", "rmsnorm").contains("--without rmsnorm leaves nothing"));
        assert_eq!(text("wgmma", ""), "'wgmma' names kernels for another");
    }
}
