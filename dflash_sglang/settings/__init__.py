"""What operators set: the plugin's configuration and its schema."""
