"""The head that proposes: the target's, the draft's own, its frequent rows, a copy in fp8."""
