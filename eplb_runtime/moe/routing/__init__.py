"""Split a batch's tokens over the slots of their experts: quotas by water-filling, logical ids to slots."""
