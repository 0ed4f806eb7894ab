//! Tables as text: what each line is of, and columns below each other.

use zero::Placement;

/// The least width of a column, so that short tables look alike.
const CELL: usize = 10;

/// The classes of memory by their numbers in [`Memory::classes`](zero::Memory::classes), as people read them: with where they
/// are, if not all of them are in one place.
pub fn classes(placement: Placement) -> impl Iterator<Item = (usize, &'static str)> {
    let names = zero::Memory::default().classes().map(|(name, _)| name);
    names.into_iter().enumerate().filter_map(move |(index, name)| match (name, placement) {
        ("host", Placement::Host) => None,
        ("host", _) => Some((index, "for transfers, on the host")),
        ("optimizer", Placement::Offloaded) => Some((index, "optimizer, on the host")),
        (name, _) => Some((index, name)),
    })
}

/// Lines in the making.
pub struct Lines {
    all: Vec<(String, Vec<String>)>,
}

impl Lines {
    /// A table that begins with what its first part is of, and the names of its columns.
    pub fn new(title: &str, columns: Vec<String>) -> Self {
        Lines { all: vec![(title.to_owned(), columns)] }
    }

    /// What the rows that follow are of.
    pub fn title(&mut self, name: &str) {
        self.all.push((name.to_owned(), Vec::new()));
    }

    /// A cell of each column.
    pub fn row(&mut self, name: &str, cells: Vec<String>) {
        self.all.push((format!("  {name}"), cells));
    }

    /// Of labels and of cells: of the widest that there is.
    fn widths(&self) -> (usize, usize) {
        let label = self.all.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        let cells = self.all.iter().flat_map(|(_, cells)| cells.iter().map(String::len));
        (label, cells.fold(CELL, usize::max))
    }

    /// Of its longest line.
    pub fn width(&self) -> usize {
        let (label, cell) = self.widths();
        label + self.all[0].1.len() * (cell + 2)
    }

    /// All of it, each line with its end.
    pub fn text(&self) -> String {
        let (label, cell) = self.widths();
        let line = |(name, cells): &(String, Vec<String>)| {
            let cells: String = cells.iter().map(|text| format!("  {text:>cell$}")).collect();
            format!("{}\n", format!("{name:<label$}{cells}").trim_end())
        };
        self.all.iter().map(line).collect()
    }
}
