"""What an architecture is: its config read, its modules counted, its checkpoint's bytes."""
