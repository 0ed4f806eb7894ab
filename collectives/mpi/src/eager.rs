//! What Open MPI sends at once, so that it does no harm where it is longer than what was posted; see
//! `transport/requests.rs`.

/// Bytes of a message that are sent at once. The same on all ranks: mpirun gives all of them the same variables. (What stands in
/// Open MPI's own files of parameters is not looked at.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Eager {
    pub to_others: usize,
    /// To the rank itself.
    pub to_self: usize,
}

impl Eager {
    /// Over every network that Open MPI has, unless a user says otherwise.
    pub(super) const USUAL: Eager = Eager { to_others: 4000, to_self: 900 };

    /// What goes beside a message, at most.
    const HEADER: usize = 128;

    /// As these variables say, of which `OMPI_MCA_btl_NAME_eager_limit` is one network's.
    pub(super) fn of(variables: impl Iterator<Item = (String, String)>) -> Self {
        let mut eager = Self::USUAL;
        for (name, value) in variables {
            let network = name.strip_prefix("OMPI_MCA_btl_").and_then(|n| n.strip_suffix("_eager_limit"));
            let Some(network) = network else { continue };
            let limit = match network {
                "self" => &mut eager.to_self,
                _ => &mut eager.to_others,
            };
            // What cannot be read may be anything.
            let said = value.trim().parse::<usize>().unwrap_or(0);
            *limit = (*limit).min(said.saturating_sub(Self::HEADER));
        }
        eager
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_who_lowers_the_limit_of_a_network_is_heard() {
        let of = |set: &[(&str, &str)]| {
            let set = set
                .iter()
                .map(|(network, limit)| (format!("OMPI_MCA_btl_{network}_eager_limit"), (*limit).to_owned()));
            Eager::of(set.chain([("OMPI_MCA_btl".to_owned(), "self,vader".to_owned())]))
        };
        assert_eq!(of(&[]), Eager::USUAL);
        assert_eq!(of(&[("vader", "65536"), ("tcp", "1048576")]), Eager::USUAL);
        assert_eq!(of(&[("vader", "1024"), ("tcp", "65536")]), Eager { to_others: 896, ..Eager::USUAL });
        assert_eq!(of(&[("self", " 512 ")]), Eager { to_self: 384, ..Eager::USUAL });
        assert_eq!(of(&[("vader", "4k"), ("self", "100")]), Eager { to_others: 0, to_self: 0 });
    }
}
