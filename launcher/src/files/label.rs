//! What files are called beside others.

use std::path::{Path, PathBuf};

/// What tells one of `files` from the others: its stem, or else as much of the end of its path as no other has.
pub fn label(path: &Path, files: &[impl AsRef<Path>]) -> String {
    let unique = |of: &dyn Fn(&Path) -> PathBuf| {
        let mine = of(path);
        let alike = files.iter().filter(|other| of(other.as_ref()) == mine).count();
        (alike == 1).then(|| mine.display().to_string())
    };
    let end = |parts: usize| {
        move |path: &Path| path.iter().skip(path.iter().count().saturating_sub(parts)).collect::<PathBuf>()
    };
    let ends = (1..=path.iter().count()).filter_map(|parts| unique(&end(parts)));
    let stem = unique(&|path| path.file_stem().unwrap_or_default().into());
    stem.into_iter().chain(ends).next().unwrap_or_else(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_is_as_long_as_tells_files_apart() {
        let paths =
            ["/a/x/1/run.json", "/a/x/2/run.json", "/a/y/2/run.json", "run.json", "x/run.txt", "x/one.json"];
        let labels = paths.map(|path| label(Path::new(path), &paths));
        assert_eq!(labels, ["1/run.json", "x/2/run.json", "y/2/run.json", "run.json", "run.txt", "one"]);
    }
}
