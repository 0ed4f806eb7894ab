//! Tensors to flat ranges to equal shards: pure arithmetic, the same on every rank.
//!
//! Neighbouring tensors are grouped into buckets. In a bucket each tensor starts at a multiple of the
//! alignment, and the length is padded to a multiple of alignment times world, so that every rank's shard is
//! equally long and starts and ends on an alignment boundary.

use std::ops::Range;

/// One tensor's place in a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Its index among the tensors that were grouped.
    pub tensor: usize,
    /// Its first element in the bucket.
    pub offset: usize,
    /// Its elements.
    pub len: usize,
}

/// A flat range of whole tensors, reduced and gathered in one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    tensors: Vec<Placed>,
    len: usize,
    world: usize,
}

impl Bucket {
    /// The tensors, in order.
    pub fn tensors(&self) -> &[Placed] {
        &self.tensors
    }

    /// Elements, padding included; a multiple of the world.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Elements of one rank's shard.
    pub fn shard_len(&self) -> usize {
        self.len / self.world
    }

    /// The elements that `rank` owns.
    pub fn shard(&self, rank: usize) -> Range<usize> {
        let n = self.shard_len();
        rank * n..(rank + 1) * n
    }

    /// What no tensor covers, in order.
    pub fn padding(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let ends = self.tensors.iter().map(|t| t.offset + t.len);
        let starts = self.tensors.iter().skip(1).map(|t| t.offset).chain([self.len]);
        ends.zip(starts).map(|(end, start)| end..start).filter(|gap| !gap.is_empty())
    }
}

/// The buckets of one group of tensors, such as a model's unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buckets {
    buckets: Vec<Bucket>,
    /// Per tensor: its bucket and its place there.
    places: Vec<(usize, Range<usize>)>,
}

impl Buckets {
    /// Groups tensors of the given lengths (in elements) into buckets of at most `most` elements before padding; a
    /// tensor that is longer is a bucket of its own. `alignment` and `world` are at least 1.
    pub fn group(lengths: &[usize], most: usize, alignment: usize, world: usize) -> Self {
        assert!(alignment > 0 && world > 0, "alignment {alignment} and world {world} are at least 1");
        let mut buckets: Vec<Bucket> = Vec::new();
        let mut places = Vec::with_capacity(lengths.len());
        for (tensor, &len) in lengths.iter().enumerate() {
            let aligned = len.next_multiple_of(alignment);
            let bucket = match buckets.last_mut() {
                Some(last) if last.len + aligned <= most => last,
                _ => {
                    buckets.push(Bucket { tensors: Vec::new(), len: 0, world });
                    buckets.last_mut().expect("just pushed")
                }
            };
            let offset = bucket.len;
            bucket.tensors.push(Placed { tensor, offset, len });
            bucket.len += aligned;
            places.push((buckets.len() - 1, offset..offset + len));
        }
        for bucket in &mut buckets {
            bucket.len = bucket.len.next_multiple_of(alignment * world);
        }
        Buckets { buckets, places }
    }

    /// How many buckets.
    pub fn count(&self) -> usize {
        self.buckets.len()
    }

    /// One bucket. Panics when out of range.
    pub fn bucket(&self, index: usize) -> &Bucket {
        &self.buckets[index]
    }

    /// All buckets, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Bucket> {
        self.buckets.iter()
    }

    /// Where a tensor is: its bucket and its range there. Panics when out of range.
    pub fn locate(&self, tensor: usize) -> (usize, Range<usize>) {
        self.places[tensor].clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn three_tensors_in_two_buckets() {
        let b = Buckets::group(&[3, 8, 20], 16, 4, 2);
        assert_eq!(b.count(), 2);
        assert_eq!(b.bucket(0).len(), 16);
        assert_eq!(b.locate(1), (0, 4..12));
        assert_eq!(b.bucket(0).padding().collect::<Vec<_>>(), [3..4, 12..16]);
        assert_eq!(b.bucket(1).len(), 24);
        assert_eq!(b.bucket(1).shard(1), 12..24);
    }

    proptest! {
        #[test]
        fn tensors_and_padding_cover_every_bucket_once(
            lengths in prop::collection::vec(0usize..5000, 1..30),
            most in 1usize..8000,
            alignment in 1usize..100,
            world in 1usize..9,
        ) {
            let buckets = Buckets::group(&lengths, most, alignment, world);
            let mut seen = 0;
            for (index, bucket) in buckets.iter().enumerate() {
                prop_assert_eq!(bucket.len() % (alignment * world), 0);
                prop_assert!(bucket.tensors().len() == 1 || bucket.len() < most + alignment * world);
                let mut covered = vec![0u8; bucket.len()];
                for t in bucket.tensors() {
                    prop_assert_eq!(t.tensor, seen);
                    prop_assert_eq!(t.offset % alignment, 0);
                    prop_assert_eq!(buckets.locate(t.tensor), (index, t.offset..t.offset + t.len));
                    prop_assert_eq!(t.len, lengths[t.tensor]);
                    covered[t.offset..t.offset + t.len].iter_mut().for_each(|c| *c += 1);
                    seen += 1;
                }
                bucket.padding().flatten().for_each(|i| covered[i] += 1);
                prop_assert!(covered.iter().all(|&c| c == 1));
                prop_assert_eq!(bucket.shard_len() * world, bucket.len());
            }
            prop_assert_eq!(seen, lengths.len());
        }
    }
}
