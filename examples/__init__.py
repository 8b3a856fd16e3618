"""Programs for users to read and run; tests run them too."""
