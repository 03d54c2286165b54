"""What the scheduler calls: the draft input carried between steps and the slots it reserves."""
