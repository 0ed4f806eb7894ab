//! What tells texts and other sequences from each other in few bytes, and numbers that look random.

/// FNV-1a, a value a step: the same number on every machine and in every build, unlike the standard library's hashers.
/// It is for names and for noticing what differs; nobody is kept from making two sequences of one digest.
pub fn digest<V: Into<u64>>(values: impl IntoIterator<Item = V>) -> u64 {
    let step = |hash: u64, value: V| (hash ^ value.into()).wrapping_mul(0x0100_0000_01b3);
    values.into_iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// The finaliser of splitmix64: a bijection in which every input bit changes half of the output bits.
#[inline(always)]
pub fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What splitmix64 gives first from 0; models, orders of data and samples are drawn by it.
    #[test]
    fn numbers_are_mixed_by_the_published_function() {
        let drawn = [1, 2, 3].map(|i| mix(0x9e37_79b9_7f4a_7c15u64.wrapping_mul(i)));
        assert_eq!(drawn, [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4, 0x06c4_5d18_8009_454f]);
    }

    /// Weights are drawn by names' digests, so another function would be another model.
    #[test]
    fn it_is_the_published_function() {
        assert_eq!(digest("".bytes()), 0xcbf2_9ce4_8422_2325);
        assert_eq!(digest("a".bytes()), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(digest("foobar".bytes()), 0x8594_4171_f739_67e8);
    }
}
