"""The strategies that Lightning's Trainer and Fabric see."""
