"""Create tables, pictures and HTML reports from run folders only."""
