"""What requests may ask for, and how those that ask for something else are refused."""
