"""Every private attribute of torch and Lightning that is used, one small function each, with a feature test."""
