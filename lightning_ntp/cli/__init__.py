"""The command line: ``lightning-ntp VERB``, one file a verb."""
