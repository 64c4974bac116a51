"""Files of other trainers as files of `raysgd train`: one table of rules per kind of file. Driver side, without torch and Ray."""
