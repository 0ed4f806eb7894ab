//! MPI libraries by their names: what is made from what, and how each is shown.

/// MPI libraries that have the same habits, as far as those matter here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Open MPI and what is made from it, such as Fujitsu MPI and IBM Spectrum MPI.
    OpenMpi,
    /// MPICH and what is made from it, such as Intel MPI and MVAPICH.
    Mpich,
    /// Cray MPICH, which differs from MPICH in who starts its ranks.
    CrayMpich,
    /// None of those that are known here.
    Unknown,
}

impl Family {
    pub(super) fn of(library: &str, small_handles: bool) -> Self {
        let library = library.to_lowercase();
        let is = |names: &[&str]| names.iter().any(|name| library.contains(name));
        if is(&["open mpi", "fujitsu mpi", "spectrum mpi"]) {
            Family::OpenMpi
        } else if is(&["cray mpich"]) {
            Family::CrayMpich
        } else if small_handles || is(&["mpich", "intel(r) mpi"]) {
            Family::Mpich
        } else {
            Family::Unknown
        }
    }

    /// Whether the library may write past a receive to which a longer message comes, as Open MPI does; one that is not known
    /// may be an Open MPI by another name.
    pub(super) fn overruns(self) -> bool {
        matches!(self, Family::OpenMpi | Family::Unknown)
    }
}

/// Whether a library is MPICH 4.0, which has faults of its own.
pub(super) fn is_mpich_4_0(library: &str) -> bool {
    library.starts_with("MPICH 4.0")
}

/// `Open MPI v4.1.4, package: …` as `Open MPI 4.1.4`, `MPICH Version:\t4.0.2\n…` as `MPICH 4.0.2`, others by their
/// first line.
pub(super) fn short(version: &str) -> String {
    let first = version.split(['\n', ',', '\0']).next().unwrap_or_default();
    let words: Vec<&str> = first.split_whitespace().filter(|&w| w != "Version:").collect();
    let name = words.join(" ").replace("Open MPI v", "Open MPI ");
    if name.is_empty() { "MPI".into() } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPEN_MPI: &str =
        "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4, repo rev: v4.1.4, May 26, 2022";
    const MPICH: &str = "MPICH Version:\t4.0.2\nMPICH Release date:\tThu Apr  7";
    const INTEL: &str = "Intel(R) MPI Library 2021.9 for Linux* OS\n";

    #[test]
    fn versions_are_short() {
        assert_eq!(short(OPEN_MPI), "Open MPI 4.1.4");
        assert_eq!(short(MPICH), "MPICH 4.0.2");
        assert_eq!(short(INTEL), "Intel(R) MPI Library 2021.9 for Linux* OS");
        assert_eq!(short(""), "MPI");
        assert!(is_mpich_4_0(&short(MPICH)) && !is_mpich_4_0("MPICH 4.1.2"));
    }

    #[test]
    fn relatives_are_known_by_their_names_or_their_handles() {
        let cray =
            "MPI VERSION    : CRAY MPICH version 8.1.21 (ANL base 3.4a2)\nMPI BUILD INFO : Fri Oct 18 2019\n";
        for (version, small_handles, family) in [
            (OPEN_MPI, false, Family::OpenMpi),
            ("FUJITSU MPI Library 4.0.0 (4.0.1fj4.0.0)\0", false, Family::OpenMpi),
            ("IBM Spectrum MPI, 10.3.1", false, Family::OpenMpi),
            (MPICH, true, Family::Mpich),
            // Built for the standard's binary interface.
            (MPICH, false, Family::Mpich),
            (INTEL, true, Family::Mpich),
            ("MVAPICH2 Version      :\t2.3.7\n", true, Family::Mpich),
            (cray, true, Family::CrayMpich),
            ("", true, Family::Mpich),
            ("MPIwrapper Version:\t2.2.2", false, Family::Unknown),
        ] {
            assert_eq!(Family::of(&short(version), small_handles), family, "{version}");
            let known = matches!(family, Family::Mpich | Family::CrayMpich);
            assert_eq!(family.overruns(), !known, "{version}");
        }
    }
}
