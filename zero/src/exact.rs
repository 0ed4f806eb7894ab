//! Sums of squares that are never rounded: whoever adds what to what, and in which order, the bits are the same. So each
//! rank adds up its own shard, wherever that begins, and what ranks tell each other does not grow with the model.

pub use models::cuda::SQUARES_WORDS as WORDS;

/// Digits of the sum. They have 32 bits each, in words of 64: so 2^32 numbers can be added before one overflows.
const DIGITS: usize = WORDS - 1;

/// Digit k counts 2^(32 k + LOWEST): the square of the least f32 is 2^-298.
const LOWEST: i32 = -298;

/// Of an f64: bits behind the leading one, and the exponent field's value for 1.
const MANTISSA: u32 = 52;
const BIAS: i32 = 1023;

/// The exact sum of numbers which are f64 sums of at most 1024 squares of f32 each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExactSum {
    /// The digits; after them, how many infinities were added, and above 32 bits how many that are no number.
    words: [u64; WORDS],
}

impl ExactSum {
    /// Of nothing.
    pub const ZERO: Self = ExactSum { words: [0; WORDS] };

    /// Adds a number, which is not negative.
    pub fn add(&mut self, x: f64) {
        let field = (x.to_bits() >> MANTISSA & 0x7ff) as i32;
        let mantissa = x.to_bits() & ((1 << MANTISSA) - 1);
        if field == 0x7ff {
            self.words[DIGITS] += if mantissa == 0 { 1 } else { 1 << 32 };
            return;
        }
        // x = mantissa * 2^(at + LOWEST); only 0 has an exponent field of 0.
        let mut mantissa = mantissa | u64::from(field > 0) << MANTISSA;
        let mut at = field - BIAS - MANTISSA as i32 - LOWEST;
        if at < 0 {
            // These bits are 0.
            mantissa >>= (-at).min(63);
            at = 0;
        }
        let shifted = u128::from(mantissa) << (at % 32);
        let digits = [shifted, shifted >> 32, shifted >> 64].map(|digit| u64::from(digit as u32));
        self.words[at as usize / 32..][..3].iter_mut().zip(digits).for_each(|(word, digit)| *word += digit);
    }

    /// Adds what another sum has come to.
    pub fn merge(&mut self, words: &[u64]) {
        self.words.iter_mut().zip(words).for_each(|(word, other)| *word += other);
    }

    /// The digits and what follows them, for others to [`merge`](Self::merge).
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// The nearest f64.
    pub fn total(&self) -> f64 {
        let others = self.words[DIGITS];
        if others != 0 {
            return if others >> 32 == 0 { f64::INFINITY } else { f64::NAN };
        }
        let mut carry = 0;
        let digits: [u32; DIGITS] = std::array::from_fn(|k| {
            carry += u128::from(self.words[k]);
            let digit = carry as u32;
            carry >>= 32;
            digit
        });
        let Some(top) = digits.iter().rposition(|&digit| digit != 0) else { return 0.0 };
        // 97 bits at least: for rounding, of all below them counts only whether they are 0.
        let taken = top + 1 - 4.min(top + 1);
        let highest = digits[taken..=top].iter().rev().fold(0, |sum, &digit| sum << 32 | u128::from(digit));
        let rest = digits[..taken].iter().any(|&digit| digit != 0);
        let power = 32 * taken as i32 + LOWEST;
        (highest | u128::from(rest)) as f64 * f64::from_bits(((power + BIAS) as u64) << MANTISSA)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Every bit of every number on its own, in as many bits as it takes.
    fn bit_by_bit(numbers: &[f64]) -> f64 {
        let mut counts = vec![0u64; 700];
        for x in numbers {
            let (mut x, mut power) = (*x, 0i32);
            while x >= 1.0 {
                (x, power) = (x / 2.0, power + 1);
            }
            while x != 0.0 {
                (x, power) = (x * 2.0, power - 1);
                if x >= 1.0 {
                    counts[(power - LOWEST) as usize] += 1;
                    x -= 1.0;
                }
            }
        }
        for i in 1..counts.len() {
            counts[i] += counts[i - 1] / 2;
            counts[i - 1] %= 2;
        }
        // Rounded as a decimal parser rounds: to nearest, ties to even.
        let Some(top) = counts.iter().rposition(|&bit| bit == 1) else { return 0.0 };
        let kept = (top + 1).saturating_sub(53);
        let mut mantissa = (kept..=top).rev().fold(0u64, |sum, i| sum << 1 | counts[i]);
        if kept > 0 && counts[kept - 1] == 1 && (mantissa % 2 == 1 || counts[..kept - 1].contains(&1)) {
            mantissa += 1;
        }
        mantissa as f64 * f64::from(kept as i32 + LOWEST).exp2()
    }

    fn sum(numbers: &[f64]) -> ExactSum {
        let mut sum = ExactSum::ZERO;
        numbers.iter().for_each(|x| sum.add(*x));
        sum
    }

    /// Sums of squares of f32 of every size, the least and the largest among them.
    fn squares() -> impl Strategy<Value = f64> {
        let float = any::<u32>().prop_map(f32::from_bits).prop_filter("finite", |x| x.is_finite());
        let special = prop::sample::select(vec![0.0, f32::from_bits(1), f32::MIN_POSITIVE, 1.0, f32::MAX]);
        prop::collection::vec(prop_oneof![3 => float, 1 => special], 1..4).prop_map(|floats| {
            let squares = floats.iter().map(|&x| f64::from(x) * f64::from(x));
            squares.sum::<f64>() * if floats.len() == 3 { 256.0 } else { 1.0 }
        })
    }

    proptest! {
        #[test]
        fn totals_are_rounded_once(numbers in prop::collection::vec(squares(), 0..20)) {
            let total = sum(&numbers).total();
            prop_assert_eq!(total.to_bits(), bit_by_bit(&numbers).to_bits(), "{}", total);
        }

        #[test]
        fn neither_order_nor_cuts_change_a_bit(
            (numbers, shuffled) in prop::collection::vec(squares(), 1..20)
                .prop_flat_map(|numbers| (Just(numbers.clone()), Just(numbers).prop_shuffle())),
            cut in any::<prop::sample::Index>(),
        ) {
            let (low, high) = shuffled.split_at(cut.index(shuffled.len()));
            let mut merged = sum(low);
            merged.merge(sum(high).words());
            prop_assert_eq!(merged, sum(&numbers));
        }
    }

    /// Half of the last bit rounds to even, and with anything below it, however small, up.
    #[test]
    fn what_is_far_below_the_last_bit_decides_a_tie() {
        let (one, half, least) = (1.0, f64::EPSILON / 2.0, f64::from(LOWEST).exp2());
        assert_eq!(sum(&[one, half]).total(), 1.0);
        assert_eq!(sum(&[one, half, least]).total(), 1.0 + f64::EPSILON);
        assert_eq!(sum(&[one, f64::EPSILON, half]).total(), 1.0 + 2.0 * f64::EPSILON);
        assert_eq!(sum(&[least]).total(), least);
    }

    #[test]
    fn what_is_not_finite_stays_so() {
        assert_eq!(sum(&[1.0, f64::INFINITY, 1.0]).total(), f64::INFINITY);
        assert!(sum(&[f64::INFINITY, f64::NAN]).total().is_nan());
        assert!(sum(&[-f64::NAN, 2.0]).total().is_nan());
    }

    /// As many as there are blocks in a model of 2 * 10^12 parameters, each as large as it may be.
    #[test]
    fn as_many_as_there_may_be_do_not_overflow() {
        let most = 1024.0 * f64::from(f32::MAX) * f64::from(f32::MAX);
        let mut all = sum(&[most]);
        for _ in 0..31 {
            all.merge(all.clone().words());
        }
        let mut others = all;
        others.merge(sum(&[most]).words());
        assert_eq!(all.total(), most * 31f64.exp2());
        assert!(others.total() >= all.total());
    }
}
