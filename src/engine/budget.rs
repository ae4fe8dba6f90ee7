//! How much may be in the process at a time, and how partitions share it.
//!
//! Half of a budget is cut into equal *shares*, one a partition, which nobody else can use up. The other half is a
//! *pool* for whoever needs more. So all of it can be used, as far as that half goes by one partition, and one whose
//! records are stuck cannot keep the others from reading: each of them still has its share.
//!
//! The sum stays within the budget, but for a time after partitions have come while it was used up: their shares are
//! theirs at once, and those of the others only become smaller as their records finish.

/// A budget, shared between so many partitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Budget {
    share: usize,
    pool: usize,
}

impl Budget {
    pub(crate) fn new(limit: usize, partitions: usize) -> Self {
        let shares = limit / 2;
        Self {
            share: shares / partitions.max(1),
            pool: limit - shares,
        }
    }

    /// What a partition that uses this much takes from the pool.
    #[inline]
    pub(crate) fn pooled(self, used: usize) -> usize {
        used.saturating_sub(self.share)
    }

    /// What a partition that uses this much may still take, with so much of the pool taken by all together.
    pub(crate) fn left(self, used: usize, pooled: usize) -> usize {
        self.share.saturating_sub(used) + self.pool.saturating_sub(pooled)
    }

    /// Whether so much is left of the pool whatever way `total` is used.
    pub(crate) fn is_plenty(self, total: usize, wanted: usize) -> bool {
        self.pool.saturating_sub(total) >= wanted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_partition_may_use_all_of_a_budget_that_it_has_to_itself() {
        let budget = Budget::new(1_001, 1);
        assert_eq!(budget.left(0, 0), 1_001);
        assert_eq!(budget.left(1_000, budget.pooled(1_000)), 1);
        assert_eq!(budget.left(1_001, budget.pooled(1_001)), 0);
    }

    #[test]
    fn greedy_partitions_leave_each_other_its_share_and_together_keep_to_the_limit() {
        let budget = Budget::new(1_000, 5);
        let mut used = [0usize; 5];
        let left = |used: &[usize; 5], at: usize| {
            let pooled = used.iter().map(|used| budget.pooled(*used)).sum();
            budget.left(used[at], pooled)
        };
        used[0] = left(&used, 0);
        assert_eq!(used[0], 600);
        for at in 1..5 {
            used[at] = left(&used, at);
            assert_eq!(used[at], 100);
        }
        assert_eq!(used.iter().sum::<usize>(), 1_000);
        used[0] = 300;
        assert_eq!(left(&used, 3), 300, "what was given back is for all");
    }

    #[test]
    fn plenty_is_never_said_of_what_is_not_left() {
        let budget = Budget::new(1_000, 4);
        for total in [0, 300, 499, 500, 2_000] {
            for wanted in [1, 200, 500] {
                if budget.is_plenty(total, wanted) {
                    assert!(budget.left(total, budget.pooled(total)) >= wanted);
                }
            }
        }
    }
}
