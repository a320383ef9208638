"""What a plan costs, by arithmetic: computation, transfers, and the time and the memory that come of them."""
