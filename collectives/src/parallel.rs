//! Pieces of work side by side.

use crate::locked;
use std::panic::resume_unwind;
use std::sync::Mutex;
use std::thread::{Builder, scope};

/// What `work` makes of each item, in their order, by up to `threads` threads, of which this one is one. Who is free takes
/// the next item: of threads that the system refuses, the others do the work.
pub fn map<I, T: Send>(
    items: impl ExactSizeIterator<Item = I> + Send,
    threads: usize,
    work: impl Fn(I) -> T + Sync,
) -> Vec<T> {
    let others = threads.min(items.len()).saturating_sub(1);
    let items = Mutex::new(items.enumerate());
    let next = || locked(&items).next();
    let take = || {
        let mut done = Vec::new();
        while let Some((i, item)) = next() {
            done.push((i, work(item)));
        }
        done
    };
    let mut done = scope(|scope| {
        let start = |_| Builder::new().spawn_scoped(scope, take).ok();
        let started: Vec<_> = (0..others).map_while(start).collect();
        let mut done = take();
        for thread in started {
            done.extend(thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
        }
        done
    });
    done.sort_unstable_by_key(|&(i, _)| i);
    done.into_iter().map(|(_, made)| made).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::sync::Barrier;
    use std::thread::current;

    #[test]
    fn each_item_is_done_once_and_in_its_place_by_any_number_of_threads() {
        for (items, threads) in [(0, 4), (1, 4), (100, 0), (100, 1), (100, 3), (3, 100)] {
            assert_eq!(map(0..items, threads, |i| i * i), (0..items).map(|i| i * i).collect::<Vec<_>>());
        }
        let mut values = [1, 2, 3, 4, 5];
        map(values.chunks_mut(2), 2, |part| part.iter_mut().for_each(|value| *value *= 2));
        assert_eq!(values, [2, 4, 6, 8, 10]);
    }

    #[test]
    fn as_many_threads_as_are_asked_for_work_at_the_same_time() {
        // Nobody gets on before all have come.
        let all = Barrier::new(3);
        let who = map(0..3, 3, |_| {
            all.wait();
            current().id()
        });
        assert_eq!(who.into_iter().collect::<HashSet<_>>().len(), 3);
        let who: HashSet<_> = map(0..50, 1, |_| current().id()).into_iter().collect();
        assert_eq!(who, HashSet::from([current().id()]));
    }
}
