"""The same rows through this tool and through the engines that people would use instead, side by side."""
